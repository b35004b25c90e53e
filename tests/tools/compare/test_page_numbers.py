"""What report.html carries: numbers that decode to those of the runs, within the budget, and text that stays text."""

import base64
import html
import json
import math
import re

import numpy as np
import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.compare import measure, plot
from lowprec_train.tools.compare.page import document, numbers
from lowprec_train.tools.compare.runs import Series, read_runs
from lowprec_train.tools.compare.telemetry import Map
from tests.tools.compare import browser


def unpacked(text, kind="<f4"):
    return np.frombuffer(base64.b64decode(text), kind)


def from_knots(knots):
    """What series.js does."""
    return np.interp(np.arange(knots[-2] + 1), knots[::2], knots[1::2])


@pytest.mark.parametrize(
    ("values", "size"),
    [([7], 2), ([1, 2, 3, 4], 4), ([10, 20, 30, 31, 32, 32, 32], 8), ([5, 1], 4), ([1, 4, 5, 9, 10, 20], 12), ([], 0)],
)
def test_knots_are_the_values_again(values, size):
    knots = numbers.knots(np.array(values, int))
    assert len(knots) == size
    np.testing.assert_array_equal(from_knots(knots) if knots else [], values)


def test_5000_regular_steps_are_two_knots():
    assert numbers.knots(np.arange(1, 5001) * 65536) == [0, 65536, 4999, 5000 * 65536]


def test_pooled_points_stay_matched_between_runs():
    """A run that starts later, or lacks steps, shares its full buckets with the others."""
    union, whole = np.arange(1, 101), Series(steps=np.arange(1, 101), values=np.arange(1, 101.0))
    part = Series(steps=np.arange(11, 96), values=np.arange(11, 96.0))
    found = [numbers.pooled(each, 10, union) for each in (whole, part)]
    assert found[0].steps.tolist() == list(range(10, 101, 10)) and found[1].steps.tolist() == [*range(20, 91, 10), 95]
    np.testing.assert_array_equal(found[0].values, np.arange(5.5, 100, 10))
    np.testing.assert_array_equal(found[1].values, [*np.arange(15.5, 90, 10), 93.0])
    assert numbers.pooled(whole, 1, union) is whole


def losses(gap=0.0, n=60):
    return (3 + 4 * np.exp(-np.arange(n) / 9) + 0.05 * np.random.default_rng(1).standard_normal(n) + gap).tolist()


def test_long_runs_are_pooled_and_their_spikes_kept(make_run, monkeypatch):
    monkeypatch.setattr(numbers, "POINTS", 20)
    spiked = losses()
    spiked[40] += 3
    runs = read_runs([make_run("bf16", losses()), make_run("fp4", spiked)])
    tree = numbers.of_comparison(measure.compare(runs), runs, "sqnr_db")
    fp4 = tree["runs"][1]
    assert tree["every"] == 3 and from_knots(fp4["steps"]).tolist() == list(range(3, 61, 3))
    np.testing.assert_allclose(unpacked(fp4["loss"]), np.reshape(spiked, (20, 3)).mean(1), rtol=1e-6)
    assert from_knots(fp4["tokens"]).tolist() == [4096 * step for step in range(3, 61, 3)]
    assert [41, spiked[40]] in [each[:2] for each in fp4["spikes"]]


GAP_PROBE = """
const [x, y] = gapOf(numbers.runs[1]);
const seen = { x: [...x], y: [...y] };
document.body.append(Object.assign(document.createElement("pre"), { id: "probe", textContent: JSON.stringify(seen) }));
"""


def test_the_gap_of_long_runs_that_log_different_steps(make_run, monkeypatch, tmp_path):
    """Every step, and 5, 15, 25, ...: these are first of their pairs in the one run and alone in the other."""
    monkeypatch.setattr(numbers, "POINTS", 30)
    base, fp4 = make_run("bf16", losses()), make_run("fp4", losses(1 / 8))
    lines = (fp4 / "metrics.jsonl").read_text().splitlines(keepends=True)
    (fp4 / "metrics.jsonl").write_text("".join(lines[4::10]))
    runs = read_runs([base, fp4])
    text = document.to_html(measure.compare(runs), runs)
    (tmp_path / "gap.html").write_text(text.replace("</body>", f"<script>{GAP_PROBE}</script></body>"))
    dom = browser.elements(tmp_path / "gap.html", (900, 700))
    seen = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)[1]))
    assert seen["x"] == [5, 15, 25, 35, 45, 55]
    np.testing.assert_allclose(seen["y"], 1 / 8, rtol=1e-6)


def test_codes_of_a_map_are_near_its_values():
    rng = np.random.default_rng(0)
    values = rng.normal(20, 5, (6, 9))
    values[1, 2] = math.nan
    found = numbers.of_map(
        Map(name="fprop.a", layers=tuple("abcdef"), steps=tuple(range(9)), values=values),
        dict(zip("abcdef", range(6))),
        every=1,
    )
    codes = unpacked(found["cells"], "u1").reshape(6, 9)
    assert codes[1, 2] == 0 and (codes == 0).sum() == 1 and codes.max() == 255
    back = found["low"] + (codes - 1.0) / 254 * (found["high"] - found["low"])
    back[1, 2] = math.nan
    np.testing.assert_allclose(back, values, atol=0.002 * np.ptp(values[np.isfinite(values)]))


@pytest.mark.parametrize(("value", "code"), [(0.0, 1), (-3.5, 1), (math.nan, 0)])
def test_a_map_of_one_value_is_one_code(value, code):
    found = numbers.of_map(Map(name="m", layers=("a",), steps=(1, 2), values=np.full((1, 2), value)), {"a": 0}, every=1)
    assert found["cells"] == code and found["low"] == found["high"] == (0 if code == 0 else value)


def test_columns_are_pooled_over_what_has_a_number():
    nan = math.nan
    each = Map(
        name="m", layers=("a", "b"), steps=(1, 2, 3, 4, 9), values=np.array([[1, 3, nan, 5, 7], [nan, nan, 2, 4, nan]])
    )
    steps, values = numbers.pooled_columns(each, 2)
    assert steps.tolist() == [2, 4, 9]
    np.testing.assert_array_equal(values, [[2, 5, 7], [nan, 3, nan]])


def test_telemetry_and_metrics_keep_to_their_budgets(make_run, monkeypatch):
    """Ten runs, each with ten noisy maps of 100 layers by 200 steps for 11 figures: 22 MB of cells become 2."""
    rng = np.random.default_rng(0)
    shape = (100, 200)
    of_run = [
        Map(name=f"m{i}.a", layers=tuple(map(str, range(100))), steps=tuple(range(200)), values=rng.random(shape))
        for i in range(10)
    ]
    monkeypatch.setattr(numbers, "read_rows", lambda path: [{}])
    monkeypatch.setattr(numbers, "maps", lambda rows, figure: of_run)
    names = ["bf16", *(f"r{i}" for i in range(9))]
    runs = read_runs([make_run(name, [3.0, 2.0]) for name in names])
    found = numbers.of_telemetry(runs, "amax")
    assert len(found["figures"]) == 11 and found["every"] == 15 and next(iter(found["figures"])) == "amax"
    assert 0.5 * numbers.CELL_BYTES < len(document.script_json(found)) < 1.15 * numbers.CELL_BYTES
    wide = Series(steps=np.arange(5000), values=rng.random(5000))
    many = [run.__class__(**{**vars(run), "metrics": {f"m{i}": wide for i in range(100)}}) for run in runs]
    points = numbers.allotted(many)
    packed = [numbers.of_metric(each, points) for run in many for each in run.metrics.values()]
    assert 0.5 * numbers.METRIC_BYTES < len(document.script_json(packed)) < 1.15 * numbers.METRIC_BYTES


def test_text_stays_text(make_run):
    """Names and notes with the signs of HTML neither end the script nor become elements."""
    evil = "</script><b id=x>&\"'"
    bf16, fp4 = make_run("bf16", losses()), make_run("fp4", losses(1 / 8))
    info = {"name": evil, "model": evil, "deviations": [evil], "overrides": [f"a.b={evil}"]}
    (fp4 / "run.json").write_text(json.dumps(json.loads((fp4 / "run.json").read_text()) | info))
    runs = read_runs([bf16, fp4])
    text = document.to_html(measure.compare(runs), runs)
    assert evil not in text and text.count("<b id") == 0 and text.count("</script>") == 2
    carried = json.loads(re.search(r'<script id="numbers" type="application/json">(.*?)</script>', text)[1])
    assert [run["name"] for run in carried["runs"]] == ["bf16", evil]
    assert text.count(html.escape(evil)) >= 6


def test_the_page_is_written_where_it_is_asked_for(make_run, monkeypatch, capsys):
    monkeypatch.setattr(plot, "save", lambda comparison, runs, target: target.touch())
    paths = [make_run("bf16", losses()), make_run("fp4", losses(1 / 8), config="optim: {lr: 0.002}\n")]
    page, command = paths[0].parent / "comparison" / "report.html", ["compare", *map(str, paths)]
    assert cli.main(command) == 0 and not page.exists()
    assert cli.main([*command, "--html", "--max-gap", "0.1"]) == 1
    assert str(page) in capsys.readouterr().out.splitlines()[-1]
    text = page.read_text()
    assert "Gate of ±0.1 nat: FAILED." in text and "fp4: gap of +0.1250 nat, matched steps" in text
    assert "<mark>0.002</mark>" in text and "more than precision" in text
    speeds = re.search(r"<h3>Speed against the baseline</h3>(.*?)</ul>", text)[1]
    assert re.findall(r"<b>(.*?)</b>", speeds) == ["1.00x", "1.00x"]


ODD_PROBE = """
const seen = { ready: document.documentElement.dataset.ready, errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
seen.axes = [...document.querySelectorAll("[data-choice=axis] button")].map((button) => button.disabled);
for (const id of ["log-x", "log-y", "raw"]) document.getElementById(id).click();
options.onHover(1, charts.loss);
options.onView([1, 1.5]);
document.getElementById("last").click();
document.getElementById("reset").click();
const paths = [...document.querySelectorAll("path[data-points]")];
seen.paths = paths.map((path) => [path.dataset.run, path.getAttribute("d")]);
seen.nonfinite = document.querySelectorAll(".mark.nonfinite").length;
document.body.append(Object.assign(document.createElement("pre"), { id: "probe", textContent: JSON.stringify(seen) }));
"""


def test_odd_runs_are_drawn_too(make_run, tmp_path):
    """A baseline that is nowhere finite, a run of one step, one without tokens or any other metric: no script fails."""
    nan = make_run("bf16", [math.nan, math.inf, -math.inf])
    one = make_run("fp8", [3.0], valid={1: 3.5})
    bare = make_run("fp4", [1.0])
    (bare / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "train/loss": {5 - i}}}\n' for i in (1, 2, 3)))
    runs = read_runs([nan, one, bare])
    text = document.to_html(measure.compare(runs, max_gap=0.5), runs)
    (tmp_path / "odd.html").write_text(text.replace("</body>", f"<script>{ODD_PROBE}</script></body>"))
    dom = browser.elements(tmp_path / "odd.html", (900, 700))
    seen = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)[1]))
    assert seen["ready"] == "true" and seen["errors"] == [] and seen["axes"] == [False, True, True]
    assert seen["nonfinite"] == 3 and "NaN" not in str(seen["paths"])
    drawn = {name: d for name, d in seen["paths"] if d}
    assert set(drawn) >= {"fp8", "fp4"}
