"""report.html in a browser: ten runs of 5,000 steps, drawn, hovered, zoomed and asked for other axes and figures."""

import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from lowprec_train.tools.compare import colours, curves, measure
from lowprec_train.tools.compare.page import document
from lowprec_train.tools.compare.runs import Run, Series
from tests.tools.compare import browser

NAMES = ("bf16", "fp8", "fp8_block", "fp4", "fp4_mixed", "mxfp4", "mxfp4_fp8", "nvfp4", "coat", "int8")
N = 5000
SIZE = (1400, 1200)
DIPS = slice(3600, 4600, 53)
TOKENS, FEWER = 4000, 2400  # a step
PROBE = Path(__file__).parent / "page_probe.js"
EXTRA = (
    "train/grad_norm",
    "train/lr",
    "time/step_ms",
    "time/data_ms",
    "perf/tflops_per_gpu",
    "perf/sol",
    "opt/a",
    "opt/b",
)


def make_run(place, folder):
    """Run `place` of ten: 1/64 nat above its predecessor, and faster; the last sees fewer tokens a step."""
    steps, noise = np.arange(1, N + 1), np.random.default_rng(3).standard_normal(N)
    loss = 3 + 6 * np.exp(-steps / 300) + 0.05 * noise + place / 64
    if NAMES[place] == "fp4":
        loss[2000] += 2
    if NAMES[place] == "nvfp4":
        loss[3000] = np.nan
    if NAMES[place] == "coat":
        loss[DIPS] -= 1
    rng = np.random.default_rng(place)
    values = {"train/loss": loss, "data/tokens": steps * (FEWER if place == 9 else TOKENS)}
    values |= {"perf/tokens_per_sec_per_gpu": np.full(N, 1000.0 * (1 + place / 10)), "mem/peak_gib": np.full(N, 2.0)}
    values |= {name: rng.random(N) for name in EXTRA}
    metrics = {name: Series(steps=steps, values=each) for name, each in values.items()}
    held = steps[999::1000]
    metrics["valid/loss"] = Series(steps=held, values=loss[held - 1] + 0.1)
    path = folder / NAMES[place]
    path.mkdir()
    return Run(
        path=path,
        label=NAMES[place],
        recipe=NAMES[place],
        model="llama_tiny",
        corpus_hash="c0ffee",
        unigram_entropy=6.0,
        deviations=("gradients travel in BF16",) if place > 7 else (),
        overrides=(),
        config={"precision.name": NAMES[place], "optim.lr": 0.001 * (1 + (place == 5))},
        metrics=metrics,
        status="done",
        notes=(),
    )


def write_telemetry(path, db):
    """Three layers and four watched steps of an operand with SQNR db(layer, step), and a state."""
    rows = [
        {"step": s, "site": f"blocks.{i}.mlp", "gemm": "fprop", "operand": "a", "sqnr_db": db(i, s)}
        for s in (10, 20, 30, 40)
        for i in range(3)
    ]
    state = {"parameter": "blocks.0.mlp.weight", "state": "exp_avg", "sqnr_db": 50.0, "stalled_pct": 2.0}
    rows += [{"step": s, **state} for s in (10, 20, 30, 40)]
    (path / "telemetry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def decibels(layer, step):
    return None if (layer, step) == (1, 20) else 20 + layer + step / 10


@pytest.fixture(scope="module")
def page(tmp_path_factory, once):
    """What was written, what was measured, what the probe saw, and a picture: made once, for all tests here."""
    folder = tmp_path_factory.mktemp("page")

    def make():
        runs = [make_run(place, folder) for place in range(len(NAMES))]
        write_telemetry(runs[1].path, decibels)
        write_telemetry(runs[3].path, lambda layer, step: 10.0)
        comparison = measure.compare(runs, max_gap=0.1)
        text = document.to_html(comparison, runs)
        file, probed = folder / "report.html", folder / "probed.html"
        file.write_text(text, encoding="utf-8")
        probed.write_text(text.replace("</body>", f"<script>{PROBE.read_text()}</script></body>"), encoding="utf-8")
        return {"text": text, "comparison": comparison, "runs": runs, "folder": folder}

    return once("report.html", make)


@pytest.fixture(scope="module")
def seen(page, once):
    """What the probe saw."""

    def make():
        text = browser.elements(page["folder"] / "probed.html", SIZE)
        return json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', text, flags=re.DOTALL)[1]))

    browser.executable()
    return once("report.html-probed", make)


def of_run(page, name):
    return next(each for each in page["comparison"].runs if each.name == name)


def test_ten_runs_of_5000_steps_weigh_less_than_5_mb(page):
    assert 100_000 < len(page["text"].encode()) < 5_000_000


def test_the_page_asks_for_nothing(page):
    """One file: nothing to load, and a policy that would refuse it."""
    assert "default-src 'none'" in page["text"]
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)|@import|url\((?!#)|fetch\(|XMLHttpRequest", page["text"])
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page["text"]))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_every_curve_is_drawn_to_its_end(page, seen):
    assert seen["errors"] == [] and seen["ready"] == "true"
    drawn = seen["drawn"]
    assert list(drawn["loss"]) == [*NAMES[1:], "bf16"] and list(drawn["gap"]) == list(NAMES[1:])
    for name in NAMES:
        x, y, points = drawn["loss"][name]
        assert points == N and x == pytest.approx(N, abs=5)
        assert y == pytest.approx(of_run(page, name).final_loss.mean, abs=0.02)
        assert drawn["metric"][name][1] == pytest.approx(of_run(page, name).tokens_per_second, rel=0.01)


def test_thinned_curves_keep_their_lowest_and_highest_points(seen):
    """5,000 points are drawn as some per pixel column; a spike of one step is there in full."""
    for name in NAMES:
        drawn, wanted, points, dips = seen["reaches"][name]
        assert drawn == pytest.approx(wanted, abs=0.01) and 1500 < points < N, name
        assert name != "coat" or dips == len(range(N)[DIPS])


@pytest.mark.parametrize("matched", ["steps", "tokens"])
def test_the_gap_is_the_one_of_the_table(page, seen, matched):
    """The scripts' subtraction and running mean against Python's, in FP64 from FP32 losses."""
    losses = {run.label: (measure.loss_over_tokens(run), run.loss) for run in page["runs"]}
    for name in NAMES[1:]:
        (own, loss), (reference, base) = losses[name], losses["bf16"]
        _, values, expected = (
            curves.at_common_steps(loss, base) if matched == "steps" else curves.at_common_tokens(own, reference)
        )
        end = curves.drawn(values - expected, page["comparison"].window)[-1]
        mean = getattr(of_run(page, name), f"gap_{matched}").nats.mean
        assert seen["gap"][matched][name][1] == pytest.approx(end, abs=2e-6) == pytest.approx(mean, abs=0.02), name
        if matched == "steps":
            assert seen["drawn"]["gap"][name][1] == pytest.approx(end, abs=1e-3)
            assert seen["finals"][name] == mean
    assert seen["gap"]["tokens"]["int8"][1] != pytest.approx(seen["gap"]["steps"]["int8"][1], abs=1e-3)


def test_spikes_held_out_losses_and_broken_steps_are_marked(seen):
    kinds = {kind: [(run, text) for k, run, text in seen["marks"] if k == kind] for kind, *_ in seen["marks"]}
    assert [run for run, _ in kinds["spike"]] == ["fp4"] and "step 2,001: spike to 5.0" in kinds["spike"][0][1]
    assert kinds["nonfinite"] == [("nvfp4", "nvfp4, step 3,001: loss not finite")]
    assert len(kinds["valid"]) == 5 * len(NAMES)
    assert seen["levels"] == 3  # the gate's two sides, the unigram entropy


def test_hovering_tells_all_values_there(seen):
    assert [row[0] for row in seen["tip"]] == list(NAMES[::-1])
    smoothed = [float(row[1]) for row in seen["tip"]]
    assert smoothed == sorted(smoothed, reverse=True) and smoothed[-1] == pytest.approx(3.0, abs=0.02)
    steps = np.diff(smoothed)
    np.testing.assert_allclose(steps, -1 / 64, atol=2e-4)
    assert all(abs(float(row[2]) - float(row[1])) < 0.3 for row in seen["tip"])
    assert seen["crosses"] == 3 and seen["otherTips"] == [True, True]


def test_zooming_in_one_chart_zooms_all(seen):
    zoomed = seen["zoomed"]
    assert zoomed["view"] == pytest.approx([1000, 2000], abs=1e-6) and zoomed["ranges"] == [zoomed["view"]] * 3
    low, high = zoomed["y"]
    assert 2.6 < low < 3.05 and 3.3 < high < 4.6  # what is visible there, no longer the steep start
    boxed = seen["boxed"]
    assert boxed["view"] == pytest.approx([1200, 1400], abs=1e-6) and low < boxed["y"][0] < boxed["y"][1] < high
    assert boxed["canReset"] and seen["whole"] == {"view": None, "y": None, "disabled": True}
    (a, b), (c, d) = seen["wheeled"], seen["shifted"]
    assert 0 < a < 2500 < b < N and c > a and d > b and d - c == pytest.approx(b - a)
    assert seen["last"][0] == pytest.approx(0.75 * seen["last"][1])


def test_other_axes(seen):
    tokens, time = seen["tokens"], seen["time"]
    assert tokens["view"] is None and tokens["label"] == "million tokens"
    assert tokens["title"] == "Gap to bf16 at matched tokens"
    assert tokens["ends"]["fp4"][0] == pytest.approx(N * TOKENS / 1e6)
    assert tokens["ends"]["int8"][0] == pytest.approx(N * FEWER / 1e6)
    assert time["label"] == "GPU hours at the median rate"
    assert time["ends"]["bf16"][0] == pytest.approx(N * TOKENS / 1000 / 3600)
    assert time["ends"]["fp4"][0] == pytest.approx(N * TOKENS / 1300 / 3600)
    assert max(map(abs, seen["logarithmic"])) < 1e-6  # the geometric mean of the ends lies halfway


def test_runs_hide_and_show(seen):
    others = [*NAMES[1:3], *NAMES[4:], "bf16"]
    assert seen["hidden"] == {"loss": others, "gap": others[:-1], "pressed": "false"}
    assert seen["alone"] == ["fp4", "bf16"] and seen["again"] == len(NAMES)


def test_smoothing_and_metrics(page, seen):
    assert seen["rawPaths"] == 0
    noise = 0.05 * np.random.default_rng(3).standard_normal(N)
    first, last = 3 + 6 * math.exp(-1 / 300) + noise[0], 3 + noise[-1]
    for place, name in enumerate(NAMES):
        assert seen["first"][name] == [1, pytest.approx(first + place / 64, abs=1e-4)]  # a mean of one
        assert seen["unsmoothed"][name] == [N, pytest.approx(last + place / 64, abs=1e-4)]
        points = seen["metric"][name][2]
        assert 500 <= points <= 1000
        expected = np.random.default_rng(place).random(N)[-(N // points) :].mean()
        assert seen["metric"][name][1] == pytest.approx(expected, abs=0.01)


def test_heat_maps_have_the_colours_of_their_cells(seen):
    """10 dB (fp4) to 26 dB (layer 2 at step 40), for all runs; a cell without a number is blank."""
    maps = seen["maps"]
    assert maps["first"] == {"fprop.a": [4, 3], "exp_avg": [4, 1]}
    assert "operands: 10" in maps["bars"] and "exp_avg: 49.5" in maps["bars"]
    assert maps["tip"] == "blocks.2.mlp, step 40: 26"
    pixels = np.array(maps["pixels"]).reshape(3, 4, 4)
    viridis = colormaps["viridis"]
    for row in range(3):
        for column, step in enumerate((10, 20, 30, 40)):
            value = decibels(row, step)
            expected = [0, 0, 0, 0] if value is None else [*viridis((value - 10) / 16, bytes=True)[:3], 255]
            np.testing.assert_allclose(pixels[row, column], expected, atol=4)
    assert maps["both"] == {"fp8: fprop.a": [4, 3], "fp4: fprop.a": [4, 3]}
    assert maps["states"] == {"fp8: exp_avg": [4, 1], "fp4: exp_avg": [4, 1]}


def ink(image, colour, box):
    """Pixels of a colour in a box of the picture."""
    left, top, right, bottom = map(round, box)
    return int((np.abs(image[top:bottom, left:right, :3] - to_rgb(colour)).max(axis=-1) < 0.05).sum())


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_the_picture_shows_every_run(page, seen, tmp_path, ground):
    options = () if ground == "light" else ("--blink-settings=preferredColorScheme=0",)
    image = imread(browser.picture(page["folder"] / "report.html", SIZE, tmp_path / "page.png", *options))
    assert image.shape[:2] == SIZE[::-1]
    for place in range(len(NAMES) - 1):
        colour = colours.of_run(place)[ground == "dark"]
        assert ink(image, colour, seen["boxes"]["gap"]) > 200, colour
    assert ink(image, colours.BASELINE[ground == "dark"], seen["boxes"]["loss"]) > 1000
    everywhere = (0, 0, *SIZE)
    assert ink(image, "#ffffff" if ground == "light" else "#181c22", everywhere) > 0.5 * SIZE[0] * SIZE[1]


def test_light_and_dark_by_the_button(seen):
    assert seen["light"] == ["rgb(245, 246, 248)", "rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert seen["dark"] == ["rgb(16, 19, 23)", "rgb(24, 28, 34)", "rgb(255, 255, 255)"]
