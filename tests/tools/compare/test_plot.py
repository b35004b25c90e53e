"""The figure: every run is in it, on the panels where it belongs, whatever its losses are."""

import math
import warnings

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from lowprec_train.tools.compare import colours, measure, plot
from lowprec_train.tools.compare.runs import read_runs


@pytest.fixture
def draw(tmp_path):
    """(rows, columns, RGB) of the figure of some run directories; matplotlib may not complain."""

    def picture(paths, **options):
        runs = read_runs(paths)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plot.save(measure.compare(runs, **options), runs, tmp_path / "curves.png")
        return imread(tmp_path / "curves.png")[..., :3]

    return picture


def losses(gap=0.0, n=100):
    return 4 + 3 * np.exp(-np.arange(n) / 20) + 0.05 * np.random.default_rng(3).standard_normal(n) + gap


def ink(image, colour):
    """Pixels of a colour in the upper and the lower panels."""
    found = np.abs(image - to_rgb(colour)).max(axis=-1) < 0.02
    return found[: len(image) // 2].sum(), found[len(image) // 2 :].sum()


@pytest.mark.parametrize("count", [2, 4, 9])
def test_shows_every_run(make_run, draw, count):
    names = ["bf16", *(f"r{i}" for i in range(1, count))]
    image = draw([make_run(name, losses(i / 32), valid={50: 5.0, 100: 4 + i / 32}) for i, name in enumerate(names)])
    assert image.shape[0] >= 1100 and image.shape[1] == 1760
    for colour in (colours.BASELINE[0], *(colours.of_run(place)[0] for place in range(count - 1))):
        assert min(ink(image, colour)) > 300, colour


def test_gate_lines_and_footnotes_are_drawn(make_run, draw):
    runs = [make_run("bf16", losses()), make_run("fp4", losses(1 / 32), deviations=["a part " * 40])]
    plain, gated = draw(runs), draw(runs, max_gap=0.04)
    assert ink(plain, plot.GATE)[1] == 0 and ink(gated, plot.GATE)[1] > 300
    assert len(plain) > len(draw([runs[0], make_run("fp8", losses(1 / 32))]))


def diverged():
    values = losses()
    values[50:60], values[60:] = 1e9, math.nan
    return values


ODD = {
    "diverged": (diverged(), 6.0),
    "one step": ([9.0], 6.0),
    "not a number": ([math.nan] * 3, None),
    "equal": (losses(), 40.0),
    "far above": (losses(8.0), 6.0),
    "constant": (np.full(100, 3.0), 1.0),
}


@pytest.mark.parametrize(("other", "entropy"), ODD.values(), ids=ODD.keys())
def test_odd_runs_do_not_hide_the_baseline(make_run, draw, other, entropy):
    facts = {"valid_unigram_entropy": entropy}
    image = draw([make_run("bf16", losses(), **facts), make_run("fp4", other, **facts)], max_gap=0.1)
    assert min(ink(image, "#000000")) > 300


def test_draws_over_steps_without_token_counts(make_run, draw):
    paths = [make_run(name, [1.0]) for name in ("bf16", "fp4")]
    for path, loss in zip(paths, (3.0, 3.5)):
        (path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "train/loss": {loss}}}\n' for i in range(40)))
    assert min(ink(draw(paths), colours.LIGHT[0])) > 300


def test_curves_end_with_the_run(make_run, monkeypatch):
    """Every strong line of losses and gaps ends at the last step; the enlarged part begins at three quarters."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.append(figure))
    runs = read_runs([make_run("bf16", losses()), make_run("fp4", losses(1 / 32))])
    plot.save(measure.compare(runs, window=30), runs, None)
    axes = kept[0].axes
    for ax, lines in ((axes[0], 2), (axes[1], 2), (axes[2], 1)):
        strong = [line.get_xdata() for line in ax.lines if line.get_linewidth() == 1.7]
        assert len(strong) == lines and all(x[-1] == pytest.approx(100 * 4.096) for x in strong)
    assert axes[1].lines[0].get_xdata()[0] == pytest.approx(76 * 4.096)
