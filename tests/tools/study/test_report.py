"""`lowprec study report` on runs whose losses are known: its JSON against numbers that are made here in another way."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.compare.over_seeds import over_seeds
from lowprec_train.tools.compare.runs import read_runs
from lowprec_train.tools.study import measure, progress, results
from tests.tools.study import synthetic

EFFECTS = {"bf16": (0.0, 0.0), "fp8": (0.002, 0.001), "fp4": (0.05, 0.01), "mxfp4": (0.05, 0.03)}  # gap, in the weights
CONTRASTS = [["fp8", "bf16"], ["fp4", "bf16"], ["fp4", "mxfp4"]]
T_FREEDOM_9 = {0.975: 2.2621572, 0.95: 1.8331129}
S = 0.003


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A study of four arms on four seeds, with a gate, and the baseline at half the length."""
    folder = tmp_path_factory.mktemp("study")
    blocks = [
        {"purpose": "gate", "seeds": [101, 102], "arms": ["bf16", "fp8"], "again": ["bf16"]},
        {"purpose": "estimate", "seeds": [1, 2, 3, 4], "axes": {"steps": [400]}},
        {"purpose": "estimate", "seeds": [1, 2], "arms": ["bf16"], "axes": {"steps": [200]}},
    ]
    arms = dict.fromkeys(EFFECTS)
    made, planned, file = synthetic.study(folder, arms=arms, blocks=blocks, contrasts=CONTRASTS)
    generator, losses = np.random.default_rng(11), {}
    seeds = {seed: float(generator.normal(0, 0.05)) for seed in made.seeds}
    for each in planned:
        gap, weights = EFFECTS[each.arm]
        length = dict(each.setting).get("steps", 400)
        loss = 4.0 + seeds[each.seed] + float(generator.normal(0, S)) + (0.2 if length == 200 else 0)
        losses[each.name] = (loss + gap, loss + weights)
        rate = 1500.0 if each.arm == "fp8" else 1000.0
        synthetic.run(folder / "runs", each, *losses[each.name], steps=length, rate=rate)
    assert cli.main(["study", "report", str(file), "--out", str(folder / "runs")]) == 0
    return folder / "runs" / "report", losses


def test_the_numbers(written):
    report, losses = written
    tree = json.loads((report / "report.json").read_text())
    cell = next(each for each in tree["cells"] if each["name"] == "steps=400")
    rows = {row["arm"]: row for row in cell["arms"]}
    table = {
        part: np.array([[losses[f"{arm}-steps_400-s{seed}"][part] for seed in (1, 2, 3, 4)] for arm in EFFECTS])
        for part in (0, 1)
    }
    means = table[0].mean(axis=1)
    squares = sum(
        (table[0][r, b] - means[r] - table[0][:, b].mean() + table[0].mean()) ** 2 for r in range(4) for b in range(4)
    )
    s = math.sqrt(squares / 9)
    assert (cell["s"], cell["freedom"]) == (pytest.approx(s), 9) and not cell["uneven"]
    assert cell["needed"] == math.ceil(2 * (T_FREEDOM_9[0.975] * s / (0.0015 * means[0])) ** 2)
    for number, arm in enumerate(EFFECTS):
        assert rows[arm]["loss"] == pytest.approx(means[number]) and rows[arm]["seeds"] == [1, 2, 3, 4]
        if arm == "bf16":
            assert rows[arm]["gap"] is None
            continue
        gap, half = means[number] - means[0], T_FREEDOM_9[0.975] * s / math.sqrt(2)
        found = rows[arm]["gap"]
        assert [found[end] for end in ("nats", "low", "high")] == pytest.approx([gap, gap - half, gap + half])
        assert found["at_most"] == pytest.approx(gap + T_FREEDOM_9[0.95] * s / math.sqrt(2))
        assert rows[arm]["percent"] == pytest.approx(100 * gap / means[0])
        weights = table[1][number].mean() - table[1][0].mean()
        assert rows[arm]["weights"]["nats"] == pytest.approx(weights)
        assert rows[arm]["forward"]["nats"] == pytest.approx(gap - weights)
        assert rows[arm]["tail"]["nats"] == pytest.approx(gap)  # their curves are parallel
    assert rows["fp8"]["words"] == f"gap <= {100 * rows['fp8']['gap']['at_most'] / means[0]:.2f} %"
    assert rows["fp4"]["words"] == f"gap >= {100 * rows['fp4']['gap']['at_least'] / means[0]:.2f} %"
    assert rows["fp8"]["speed"] == pytest.approx(1.5, rel=1e-3)


def test_extra_tokens_and_the_curve(written):
    """A doubling is worth what the two lengths of the baseline differ by, seed for seed."""
    report, losses = written
    tree = json.loads((report / "report.json").read_text())
    cell = next(each for each in tree["cells"] if each["name"] == "steps=400")
    rows = {row["arm"]: row for row in cell["arms"]}
    worth = np.mean([losses[f"bf16-steps_200-s{s}"][0] - losses[f"bf16-steps_400-s{s}"][0] for s in (1, 2)])
    gap = rows["fp4"]["gap"]
    for end, nats in (("share", gap["nats"]), ("low", gap["low"]), ("high", gap["high"])):
        assert rows["fp4"]["extra"][end] == pytest.approx(2 ** (nats / worth) - 1)
    assert rows["fp8"]["at_loss"] == pytest.approx(rows["fp8"]["speed"] / (1 + rows["fp8"]["extra"]["share"]))
    curve = rows["mxfp4"]["curve"]
    assert [point["share"] for point in curve] == pytest.approx([i / 8 for i in range(1, 9)])
    base = np.mean([losses[f"bf16-steps_400-s{s}"][0] for s in (1, 2, 3, 4)])
    assert curve[3]["percent"] == pytest.approx(100 * gap_of("mxfp4", losses) / (base + 1.5))
    assert curve[7]["percent"] == pytest.approx(rows["mxfp4"]["percent"])


def gap_of(arm, losses):
    return np.mean([losses[f"{arm}-steps_400-s{s}"][0] - losses[f"bf16-steps_400-s{s}"][0] for s in (1, 2, 3, 4)])


def test_contrasts_gate_and_repeats(written):
    report, losses = written
    tree = json.loads((report / "report.json").read_text())
    found = {(each["of"], each["to"]): each for each in tree["contrasts"]}
    raw = {pair: each["difference"]["p"] for pair, each in found.items()}
    for pair, p in raw.items():  # Holm, said again: the largest of the smaller ones times how many are left
        smaller = sorted(value for value in raw.values() if value <= p)
        assert found[pair]["p"] == pytest.approx(min(1, max((3 - i) * v for i, v in enumerate(smaller))))
    assert found["fp4", "bf16"]["words"] == "fp4 worse than bf16"
    assert found["fp4", "mxfp4"]["words"].startswith("not resolved at +- 0.00")
    (gate,) = tree["gate"]
    assert [(each["arm"], each["seed"]) for each in gate["repeats"]] == [("bf16", 101), ("bf16", 102)]
    difference = losses["bf16-s101-again"][0] - losses["bf16-s101"][0]
    assert gate["repeats"][0]["difference"] == pytest.approx(difference)
    assert gate["freedom"] == 1  # repeats are no observations of the design
    other = losses["bf16-s102-again"][0] - losses["bf16-s102"][0]
    sd = math.sqrt((difference**2 + other**2) / 4)
    assert f"SD of one run between such repeats: {sd:.5f} nat." in (report / "report.md").read_text()


class Requests(HTMLParser):
    """Whatever a page would load."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [v for k, v in attributes if k in ("src", "href") and v and not v.startswith(("data:", "#"))]


def test_markdown_page_and_figure_say_the_same(written):
    report, _ = written
    text, page = (report / "report.md").read_text(), (report / "report.html").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| fp4 | 4 |"))
    tree = json.loads((report / "report.json").read_text())
    gap = next(row for row in tree["cells"][0]["arms"] if row["arm"] == "fp4")["gap"]
    assert f"{gap['nats']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]" in row
    assert f"{gap['nats']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]" in page
    assert "bf16, seed 101, trained twice" in text and "c0ffee" in text and "Residual SD s = 0.00" in text
    parser = Requests()
    parser.feed(page)
    assert not parser.found and "data:image/svg+xml;base64," in page
    assert re.search(r"<svg", (report / "figure.svg").read_text())


def test_a_fork_counts_its_own_steps(tmp_path):
    """Clipped and skipped steps before the common start belong to the trunk, which is the repeat of its own fork."""
    blocks = [{"purpose": "estimate", "seeds": [1, 2], "fork": {"arm": "bf16", "step": 100}}]
    made, planned, _ = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=blocks)
    for each in planned:
        directory = synthetic.run(tmp_path / "runs", each, 4.0 + 0.25 * (each.arm == "fp8") + 0.125 * each.seed)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["train/grad_norm"] = 2.0 if line["step"] <= 100 or line["step"] == 400 else 0.5
            line["train/skipped"] = min(line["step"], 3) + (line["step"] > 200)
        (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if each.trunk:
            start = {"trunk": each.trunk, "step": 100, "checkpoint": "a"}
            (directory / "fork.json").write_text(json.dumps(start))
    (cell,) = measure.measure(made, *results.read(planned, tmp_path / "runs")).cells
    assert cell.name == "from step 100 of bf16" and [row.arm for row in cell.arms] == ["bf16", "fp8"]
    assert [(row.clipped, row.skipped) for row in cell.arms] == [(pytest.approx(1 / 300), 2)] * 2  # of two seeds
    assert cell.arms[1].gap.nats == pytest.approx(0.25)
    assert [(each.arm, each.seed, each.difference) for each in cell.repeats] == [("bf16", 1, 0.0), ("bf16", 2, 0.0)]


def test_compare_says_what_the_study_says(tmp_path):
    """Of the same runs: gaps, intervals, s; a run that diverged costs its arm the gap, and a second run of a seed is no
    observation.
    """
    blocks = [{"purpose": "estimate", "seeds": [1, 2, 3], "again": ["bf16"]}]
    made, planned, _ = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8", "fp4"]), blocks=blocks)
    out = tmp_path / "runs"
    for number, each in enumerate(planned):
        loss = 4 + 0.1 * each.seed + 0.02 * (each.arm == "fp8") + 0.003 * (number * 7 % 5)
        synthetic.run(out, each, loss, diverged=each.name == "fp4-s2")
    cell = measure.measure(made, *results.read(planned, out)).cells[0]
    gap, runs = cell.arms[1].gap, read_runs([out / each.name for each in planned])
    found = over_seeds(runs, runs[0], 10)
    assert [(each.arm, each.seeds) for each in found.gaps] == [("fp8", 3)]
    assert (found.s, found.freedom) == (pytest.approx(cell.s), cell.freedom)
    ends = [getattr(found.gaps[0], end) for end in ("nats", "low", "high")]
    assert ends == pytest.approx([gap.nats, gap.low, gap.high], abs=1e-9)
    assert found.note == "diverged, incomplete or not finite on a seed, so without a gap: fp4"


def test_a_diverged_seed_is_never_dropped(tmp_path, capsys):
    blocks = [{"purpose": "estimate", "seeds": [1, 2, 3]}]
    _, planned, file = synthetic.study(
        tmp_path,
        arms=dict.fromkeys(["bf16", "fp8", "fp4"]),
        blocks=blocks,
        contrasts=[["fp4", "bf16"], ["fp8", "bf16"]],
    )
    out = tmp_path / "runs"
    for each in planned:
        loss = 4 + 0.01 * each.seed + (0.001 * each.seed if each.arm == "fp8" else 0)
        synthetic.run(out, each, loss, diverged=each.name == "fp4-s2")
    assert cli.main(["study", "report", str(file), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    tree = json.loads((out / "report" / "report.json").read_text())
    row = tree["cells"][0]["arms"][2]
    assert row["words"] == "unstable (1 of 3): seed 2 diverged at step 200"
    assert row["gap"] is None and row["loss"] is None and tree["cells"][0]["freedom"] == 2
    assert tree["contrasts"][0]["words"] == "not compared: an arm is unstable"
    assert "unstable (1 of 3): seed 2 diverged at step 200" in text


def test_a_run_that_diverged_before_anything_was_logged_counts(tmp_path):
    _, planned, file = synthetic.study(
        tmp_path, arms=dict.fromkeys(["bf16", "fp4"]), blocks=[{"purpose": "estimate", "seeds": [1, 2]}]
    )
    for each in planned:
        directory = synthetic.run(tmp_path / "runs", each, 4.0, diverged=each.name == "fp4-s1")
        if each.name == "fp4-s1":
            (directory / "metrics.jsonl").unlink()
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 0
    tree = json.loads((tmp_path / "runs" / "report" / "report.json").read_text())
    told = "unstable (1 of 2): seed 1 diverged before a loss was logged"
    assert tree["cells"][0]["arms"][1]["words"] == told


def test_an_arm_that_ends_above_word_frequencies_is_unstable_where_others_do_not(tmp_path):
    _, planned, file = synthetic.study(
        tmp_path, arms=dict.fromkeys(["bf16", "fp4"]), blocks=[{"purpose": "estimate", "seeds": [1, 2]}]
    )
    for each in planned:
        synthetic.run(tmp_path / "runs", each, 7.5 if each.name == "fp4-s1" else 4.0)
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 0
    tree = json.loads((tmp_path / "runs" / "report" / "report.json").read_text())
    assert tree["cells"][0]["arms"][1]["words"] == "unstable (1 of 2): seed 1 ends at 7.50, above the unigram entropy"


def test_predictions_and_speeds_that_mean_nothing(tmp_path, capsys):
    """A prediction stands beside its gap; runs that shared a device have no speed, and an empty column is left out."""
    blocks = [{"purpose": "estimate", "seeds": [1, 2]}]
    _, planned, file = synthetic.study(tmp_path, arms={"bf16": None, "fp8": {"predicted": 1.25}}, blocks=blocks)
    for each in planned:
        synthetic.run(tmp_path / "runs", each, 4.0 + 0.01 * each.seed + 0.04 * (each.arm == "fp8"))
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().out
    assert "| predicted % |" in told and "| +1.00 | +1.25 |" in told and "| tokens/s |" in told
    progress.note_shared(tmp_path / "runs", "fp8-s1")
    progress.note_shared(tmp_path / "runs", "fp8-s2")
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 0
    row = json.loads((tmp_path / "runs" / "report" / "report.json").read_text())["cells"][0]["arms"][1]
    assert (row["speed"], row["predicted"]) == (None, 1.25)
    assert "| speed at equal loss |" not in capsys.readouterr().out


def test_unfinished_runs_and_one_seed(tmp_path, capsys):
    """What is left is named; one block gives no interval and no ranking."""
    _, planned, file = synthetic.study(
        tmp_path,
        arms=dict.fromkeys(["bf16", "fp8"]),
        blocks=[{"purpose": "estimate", "seeds": [1, 2]}],
        contrasts=[["fp8", "bf16"]],
    )
    out = tmp_path / "runs"
    assert cli.main(["study", "report", str(file), "--out", str(out)]) == 2
    assert "no run is finished" in capsys.readouterr().err
    for each in planned[:2]:
        synthetic.run(out, each, 4.0 + 0.01 * (each.arm == "fp8"))
    assert cli.main(["study", "report", str(file), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "no interval: one seed" in text and "not resolved: too few seeds for an interval" in text
    assert "not finished, not in any number: bf16-s2, fp8-s2" in text and "Nothing can be ranked." in text


def test_other_text_is_refused(tmp_path, capsys):
    _, planned, file = synthetic.study(
        tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=[{"purpose": "estimate", "seeds": [1]}]
    )
    for each, corpus in zip(planned, ("c0ffee", "decaf"), strict=True):
        synthetic.run(tmp_path / "runs", each, 4.0, corpus_hash=corpus)
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 2
    assert "fp8-s1 has corpus hash decaf, and bf16-s1 has c0ffee" in capsys.readouterr().err
