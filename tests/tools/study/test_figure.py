"""The figure of a study: a row of axes for each cell that compares arms, and one legend."""

import pytest

from lowprec_train.tools.study import figure, measure, results
from tests.tools.study import synthetic

GAPS = {"bf16": 0.0, "fp8": 0.02, "fp4": 0.08}
RATES = [0.001, 0.002]


@pytest.fixture
def drawn(tmp_path_factory, monkeypatch):
    """Draw the figure of a study with these blocks and diverged runs; gaps double from one rate to the next."""
    kept = []
    monkeypatch.setattr(figure, "write", lambda picture, file: kept.append(picture))

    def draw(*blocks, diverged=()):
        folder = tmp_path_factory.mktemp("study")
        blocks = [{"purpose": "estimate", "seeds": [1, 2]} | each for each in blocks]
        made, planned, _ = synthetic.study(folder, arms=dict.fromkeys(GAPS), blocks=blocks)
        for each in planned:
            setting = dict(each.setting)
            loss = 4.0 + 0.1 * each.seed + GAPS[each.arm] * setting.get("optim.lr", RATES[0]) / RATES[0]
            steps = setting.get("steps", synthetic.STEPS)
            synthetic.run(folder / "runs", each, loss, steps=steps, diverged=each.name in diverged)
        figure.save(measure.measure(made, *results.read(planned, folder / "runs")), folder / "figure.svg")
        return kept.pop()

    return draw


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines if line.get_label() in GAPS}


def titles_of(picture):
    return [axes.get_title("left") for axes in picture.axes]


def legend_of(picture):
    (legend,) = picture.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_row_for_each_cell(drawn):
    """Rows show the gaps of their own cell, and an arm has one colour in all rows, also where another is unstable."""
    picture = drawn({"axes": {"optim.lr": RATES}}, diverged=("fp8-lr_0.001-s1",))
    final = "whole validation split, 95 % intervals"
    assert titles_of(picture) == ["optim.lr=0.001: along the run", final, "optim.lr=0.002: along the run", final]
    first, second = lines_of(picture.axes[0]), lines_of(picture.axes[2])
    assert (set(first), set(second)) == ({"fp4"}, {"fp8", "fp4"})
    assert first["fp4"].get_color() == second["fp4"].get_color() != second["fp8"].get_color()
    assert [each["fp4"].get_ydata()[-1] for each in (first, second)] == pytest.approx([100 * 0.08 / 4.15, 16 / 4.15])
    assert [text.get_text() for text in picture.axes[1].texts] == ["  unstable"] and not picture.axes[3].texts
    assert legend_of(picture) == ["SD of the baseline's seeds", "fp4", "fp8"]


def test_one_cell_has_one_row_without_a_name(drawn):
    rows = drawn({"axes": {"optim.lr": RATES}})
    picture = drawn({"axes": {"optim.lr": RATES[:1]}})
    assert titles_of(picture) == ["along the run", "whole validation split, 95 % intervals"]
    assert legend_of(picture) == ["SD of the baseline's seeds", "fp8", "fp4"] == legend_of(rows)
    assert rows.get_figheight() == pytest.approx(2 * picture.get_figheight())


def test_a_cell_of_the_baseline_alone_has_no_row(drawn):
    """Such as the baseline's other lengths, which express gaps in tokens: the row that is drawn is named."""
    lengths = {"arms": ["bf16"], "axes": {"steps": [200]}}
    picture = drawn(lengths, {"axes": {"steps": [400]}})
    assert titles_of(picture) == ["steps=400: along the run", "whole validation split, 95 % intervals"]
    assert set(lines_of(picture.axes[0])) == {"fp8", "fp4"}
