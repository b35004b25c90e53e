"""What a report says where runs are missing, or lack a number: that arm alone goes without it."""

import json
import math
import re
import warnings

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.study.statistics import BlockFit
from tests.tools.study import synthetic


def report(folder, file, *options):
    """report.json."""
    assert cli.main(["study", "report", str(file), "--out", str(folder / "runs"), *options]) == 0
    return json.loads((folder / "runs" / "report" / "report.json").read_text())


def line_of(directory, step, **values):
    """Change one line of metrics.jsonl."""
    file = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[step - 1] |= values
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_runs_of_another_configuration_are_not_reported(tmp_path, capsys):
    blocks = [{"purpose": "estimate", "seeds": [1, 2]}]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=blocks)
    for each in planned:
        synthetic.run(tmp_path / "runs", each, 4.0)
    words = ["study", "report", str(file), "--out", str(tmp_path / "runs"), "--set"]
    assert cli.main([*words, "eval_interval=7"]) == 0  # does not change what is learned
    capsys.readouterr()
    assert cli.main([*words, "optim.lr=0.5"]) == 2
    told = capsys.readouterr().err
    assert "bf16-s1 was trained with another configuration" in told and "optim.lr: saved 0.001, now 0.5" in told


def test_arms_without_a_common_seed_make_no_gap_and_the_rest_stays(tmp_path, capsys):
    blocks = [
        {"purpose": "estimate", "seeds": [1, 2, 3], "arms": ["bf16", "fp8"]},
        {"purpose": "estimate", "seeds": [4, 5], "arms": ["fp4"]},
    ]
    contrasts = [["fp4", "bf16"], ["fp8", "bf16"]]
    arms = dict.fromkeys(["bf16", "fp8", "fp4"])
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=blocks, contrasts=contrasts)
    for each in planned:
        gap = {"bf16": 0, "fp8": 0.001 * each.seed, "fp4": 0.5}[each.arm]
        synthetic.run(tmp_path / "runs", each, 4 + 0.01 * each.seed + gap)
    tree = report(tmp_path, file)
    rows = {row["arm"]: row for row in tree["cells"][0]["arms"]}
    assert rows["fp4"]["gap"] is None and rows["fp4"]["words"] == "no seed in common"
    assert rows["fp4"]["loss"] == pytest.approx(4.545)  # of its own seeds
    assert rows["fp8"]["gap"]["nats"] == pytest.approx(0.002)
    assert tree["contrasts"][0]["words"] == "no seed in common"
    assert "no seed in common" in capsys.readouterr().out


def test_a_chain_of_seeds_makes_a_gap_but_no_pair(tmp_path):
    blocks = [
        {"purpose": "estimate", "seeds": [1], "arms": ["bf16", "fp8"]},
        {"purpose": "estimate", "seeds": [2], "arms": ["fp8", "fp4"]},
    ]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8", "fp4"]), blocks=blocks)
    for each in planned:
        synthetic.run(tmp_path / "runs", each, 4 + 0.01 * each.seed + {"bf16": 0, "fp8": 0.1, "fp4": 0.3}[each.arm])
    row = report(tmp_path, file)["cells"][0]["arms"][2]
    assert row["gap"]["nats"] == pytest.approx(0.3) and row["forward"] is None


def test_numbers_that_are_not_finite_cost_their_own_arm_alone(tmp_path):
    """A skipped step's loss is left out of the tail; a forward pass in BF16 that overflows leaves its arm without
    "weights"; a run that diverged before a loss was logged is unstable.
    """
    arms = dict.fromkeys(["bf16", "fp8", "fp4", "mxfp4"])
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=[{"purpose": "estimate", "seeds": [1, 2, 3]}])
    for each in planned:
        gap = {"bf16": 0, "fp8": 0.001 * each.seed, "fp4": 0.5, "mxfp4": 0.1}[each.arm]
        weights = math.inf if each.name == "fp4-s2" else 4 + gap
        directory = synthetic.run(tmp_path / "runs", each, 4 + gap, weights, diverged=each.name == "mxfp4-s1")
        if each.name == "bf16-s2":
            line_of(directory, 395, **{"train/loss": math.nan})
        if each.name == "mxfp4-s1":
            (directory / "metrics.jsonl").write_text('{"step": 1, "train/skipped": 1}\n')
    rows = {row["arm"]: row for row in report(tmp_path, file)["cells"][0]["arms"]}
    assert rows["fp8"]["tail"]["nats"] == pytest.approx(0.002, abs=1e-3)
    assert rows["fp4"]["gap"]["nats"] == pytest.approx(0.5)
    assert rows["fp4"]["weights"] is None and rows["fp4"]["forward"] is None
    assert rows["fp8"]["weights"]["nats"] == pytest.approx(0.002)
    assert rows["mxfp4"]["words"] == "unstable (1 of 3): seed 1 diverged before a loss was logged"


def test_a_study_of_which_only_such_a_run_is_finished(tmp_path):
    blocks = [{"purpose": "estimate", "seeds": [1]}]
    _, planned, file = synthetic.study(tmp_path, arms={"bf16": None}, blocks=blocks)
    directory = synthetic.run(tmp_path / "runs", planned[0], 4.0, diverged=True)
    (directory / "metrics.jsonl").write_text("")
    assert report(tmp_path, file)["cells"][0]["arms"][0]["unstable"] == {"1": "diverged before a loss was logged"}


def test_the_curve_is_of_shares_of_the_whole_run(tmp_path):
    """An arm whose last evaluations are missing ends before 1."""
    _, planned, file = synthetic.study(
        tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=[{"purpose": "estimate", "seeds": [1]}]
    )
    for each in planned:
        directory = synthetic.run(tmp_path / "runs", each, 4.0)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: x for key, x in line.items() if key != "valid/loss" or line["step"] <= 250} for line in lines]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    curve = report(tmp_path, file)["cells"][0]["arms"][1]["curve"]
    assert [point["share"] for point in curve] == pytest.approx([i / 8 for i in range(1, 6)])


def test_arms_of_other_lengths_say_so(tmp_path):
    """An arm's own overrides: the header has both ends, the table each arm's tokens, and the law its own."""
    arms = {"bf16": None, "long": {"recipe": "bf16", "overrides": ["steps=800"]}}
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=[{"purpose": "estimate", "seeds": [1, 2]}])
    for each in planned:
        long = each.arm == "long"
        synthetic.run(tmp_path / "runs", each, 3.9 if long else 4.0, steps=800 if long else 400)
    (cell,) = report(tmp_path, file)["cells"]
    assert cell["tokens"] == [400 * 4096, 800 * 4096] and cell["parameters"] == [500_000, 500_000]
    assert {row["arm"]: row["tokens"] for row in cell["arms"]} == {"bf16": 400 * 4096, "long": 800 * 4096}
    folder = tmp_path / "runs" / "report"
    text = (folder / "report.md").read_text()
    assert "1,638,400 to 3,276,800 tokens, 500,000 parameters without embedding and head, D/N 3.28 to 6.55." in text
    assert re.search(r"\| arm +\| +tokens +\| +n ", text) and re.search(r"\| long +\| +3,276,800 ", text)
    assert "1,638,400 to 3,276,800 tokens, D/N 3.28 to 6.55" in (folder / "report.html").read_text()


def test_lengths_on_other_seeds_are_worth_no_tokens(tmp_path):
    blocks = [
        {"purpose": "estimate", "seeds": [1, 2], "axes": {"steps": [400]}},
        {"purpose": "estimate", "seeds": [3, 4], "arms": ["bf16"], "axes": {"steps": [200]}},
        {"purpose": "estimate", "seeds": [2], "arms": ["bf16"], "axes": {"steps": [100]}},
    ]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=blocks)
    for each in planned:
        steps = dict(each.setting)["steps"]
        loss = 4 + each.seed + 0.1 * math.log2(400 / steps) + (0.05 if each.arm == "fp8" else 0)
        synthetic.run(tmp_path / "runs", each, loss, steps=steps, valid_unigram_entropy=20.0)
    (row,) = (row for row in report(tmp_path, file)["cells"][0]["arms"] if row["arm"] == "fp8")
    assert row["extra"]["share"] == pytest.approx(2**0.5 - 1)  # 0.1 nat a doubling, from lengths 400 and 100 alone


def test_a_length_with_an_unstable_seed_is_worth_no_tokens(tmp_path):
    """Its mean would be of the seeds that happened to be stable."""
    blocks = [
        {"purpose": "estimate", "seeds": [1, 2], "axes": {"steps": [400]}},
        {"purpose": "estimate", "seeds": [1, 2], "arms": ["bf16"], "axes": {"steps": [100, 200]}},
    ]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=blocks)
    for each in planned:
        steps = dict(each.setting)["steps"]
        diverged = (steps, each.seed) == (200, 2)
        loss = 4 + each.seed + 0.1 * math.log2(400 / steps) + (0.05 if each.arm == "fp8" else 0)
        loss += 0.02 * (steps == 200)
        synthetic.run(tmp_path / "runs", each, loss, steps=steps, diverged=diverged, valid_unigram_entropy=20.0)
    (row,) = (row for row in report(tmp_path, file)["cells"][0]["arms"] if row["arm"] == "fp8")
    assert row["extra"]["share"] == pytest.approx(2**0.5 - 1)


def test_speeds_leave_out_repeats_and_other_devices(tmp_path):
    blocks = [{"purpose": "estimate", "seeds": [1, 2], "again": ["bf16"]}]
    arms = dict.fromkeys(["bf16", "fp8", "mxfp4"])
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=blocks)
    for each in planned:
        rate = 3000.0 if each.repeat else 1500.0 if each.arm == "fp8" else 1000.0
        device = "another" if each.arm == "mxfp4" else "one"
        synthetic.run(tmp_path / "runs", each, 4.0 + 0.01 * each.seed, rate=rate, device=device)
    rows = {row["arm"]: row["speed"] for row in report(tmp_path, file)["cells"][0]["arms"]}
    assert rows == {"bf16": pytest.approx(1), "fp8": pytest.approx(1.5, rel=1e-3), "mxfp4": None}


def test_evaluations_of_other_tokens_are_no_curve(tmp_path):
    """The trainer evaluates eval_batches micro-batches."""
    arms = {"bf16": None, "fp8": None, "large": {"recipe": "fp8", "overrides": ["micro_batch=4"]}}
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=[{"purpose": "estimate", "seeds": [1, 2]}])
    for each in planned:
        synthetic.run(tmp_path / "runs", each, 4.0 + 0.01 * each.seed)
    found = [report(tmp_path, file)]
    stored = tmp_path / "results.json"
    stored.write_text((tmp_path / "runs" / "report" / "results.json").read_text())
    assert cli.main(["study", "report", str(file), "--results", str(stored), "--out", str(tmp_path / "elsewhere")]) == 0
    found.append(json.loads((tmp_path / "elsewhere" / "report" / "report.json").read_text()))
    for each in found:
        assert [len(row["curve"]) for row in each["cells"][0]["arms"]] == [0, 8, 0]


def test_a_run_that_lost_metrics_is_an_error(tmp_path, capsys):
    blocks = [{"purpose": "estimate", "seeds": [1, 2]}]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=blocks)
    for each in planned:
        run = synthetic.run(tmp_path / "runs", each, 4.0 + 0.01 * each.seed)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:200]))
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert f"{run}: metrics.jsonl ends at step 200, but the run ended at step 400" in said, said


def test_a_mean_that_the_runs_do_not_determine_is_of_the_arms_own_seeds():
    fit = BlockFit({("bf16", 1): 3.0, ("fp8", 2): 4.0, ("bf16", 3): 3.2, ("fp8", 4): 4.4})
    assert fit.mean("bf16") == pytest.approx(3.1) and fit.mean("fp8") == pytest.approx(4.2)
    assert fit.connected("fp8").arms == ["fp8"]


@pytest.mark.parametrize("lost", [("bf16-s1", "bf16-s2", "bf16-s3"), ("bf16-s1", "bf16-s2")], ids=len)
def test_a_baseline_of_few_runs_has_no_spread(tmp_path, lost):
    arms = dict.fromkeys(["bf16", "fp8", "fp4"])
    _, planned, file = synthetic.study(tmp_path, arms=arms, blocks=[{"purpose": "estimate", "seeds": [1, 2, 3]}])
    for each in planned:
        if each.name not in lost:
            synthetic.run(tmp_path / "runs", each, 4 + 0.01 * each.seed ** (each.arm == "fp4"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert report(tmp_path, file)["cells"][0]["band"] is None
