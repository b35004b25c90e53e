"""The report of a sweep, on runs whose losses are known: best values, ranges, gaps and sensitivity."""

import json
import math

import numpy as np
import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.study import figure, measure, report, results
from tests.tools.study import synthetic

RATES = [0.001, 0.003, 0.01, 0.03]
SEEDS = [7, 8, 9]
STEPS = 40
T_FREEDOM_2 = 4.3026527
AT = {"bf16": 0.003, "fp4": 0.01}  # where each arm is best


def losses(arm, rate, seed):
    """A parabola in log rate about the arm's best one, a seed's effect, and noise that the test knows."""
    noise = 0.003 * math.sin(1 + 7 * seed + 100 * rate * (1 if arm == "bf16" else 2))
    return (4.0 if arm == "bf16" else 4.02) + 0.25 * math.log10(rate / AT[arm]) ** 2 + 0.05 * (seed - 8) + noise


def swept(folder, *, diverged=(), missing=(), blocks=None, loss=losses):
    """(study, its runs, its file) with runs in `folder / "runs"`; `diverged` and `missing` hold names of runs."""
    over = [{"purpose": "sweep", "seeds": SEEDS, "axes": {"optim.lr": RATES}}]
    made, planned, file = synthetic.study(
        folder, arms=dict.fromkeys(AT), blocks=blocks or over, overrides=[f"steps={STEPS}"]
    )
    for each in planned:
        if each.name not in missing:
            value = loss(each.arm, dict(each.setting).get("optim.lr"), each.seed)
            more = {"steps": STEPS, "sharpness": each.seed / 100, "diverged": each.name in diverged}
            synthetic.run(folder / "runs", each, value, **more)
    return made, planned, file


def reported(folder, **options):
    """report.json and report.md."""
    made, planned, _ = swept(folder, **options)
    measured = measure.measure(made, *results.read(planned, folder / "runs"))
    return json.loads(report.to_json(measured)), report.to_markdown(measured, made, figure="figure.svg")


def rows_of(tree):
    return {(row["arm"], row["value"]): row for row in tree["sweep"]}


def test_best_values_ranges_and_gaps(tmp_path):
    _, _, file = swept(tmp_path)
    assert cli.main(["study", "report", str(file), "--out", str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / "report"
    tree, text = json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()
    rows, arms = rows_of(tree), {each["arm"]: each for each in tree["sweep_arms"]}
    mean = {key: np.mean([losses(*key, seed) for seed in SEEDS]) for key in rows}
    for key, row in rows.items():
        assert row["loss"] == pytest.approx(mean[key])
        assert row["spread"] == pytest.approx(np.std([losses(*key, seed) for seed in SEEDS], ddof=1))
        assert row["works"] == (mean[key] <= 1.02 * mean[key[0], AT[key[0]]]) and row["best"] == (key[1] == AT[key[0]])
    assert arms["bf16"]["works"] == ["optim.lr=0.001", "optim.lr=0.003", "optim.lr=0.01"]
    assert arms["fp4"]["works"] == ["optim.lr=0.003", "optim.lr=0.01", "optim.lr=0.03"]
    for key, rate in (("own", 0.01), ("common", 0.003)):
        apart = [losses("fp4", rate, seed) - losses("bf16", 0.003, seed) for seed in SEEDS]
        half = T_FREEDOM_2 * np.std(apart, ddof=1) / math.sqrt(3)
        found = arms["fp4"][key]
        assert [found[end] for end in ("nats", "low", "high")] == pytest.approx(
            [np.mean(apart), np.mean(apart) - half, np.mean(apart) + half]
        )
    assert (arms["bf16"]["own"], arms["bf16"]["common"]) == (None, None)
    everything = [losses("bf16", rate, seed) for rate in RATES for seed in SEEDS]
    assert arms["bf16"]["sensitivity"] == pytest.approx(np.mean(everything) - mean["bf16", 0.003])
    table = next(line for line in text.splitlines() if line.startswith("| 0.03 |"))
    assert f"| ({mean['bf16', 0.03]:.4f} +- " in table and f"| {mean['fp4', 0.03]:.4f} +- " in table
    assert f"| **{mean['fp4', 0.01]:.4f} +- " in text and "![losses of the sweep](sweep.svg)" in text
    assert (folder / "sweep.svg").read_text().count("<path") > 5 and not tree["cells"]


def test_a_diverged_run_is_a_result(tmp_path):
    """Its setting does not work, has no loss and no gap; sensitivity counts it with the loss of its start."""
    tree, text = reported(tmp_path, diverged=("bf16-lr_0.003-s8", "fp4-lr_0.03-s9"))
    rows, arms = rows_of(tree), {each["arm"]: each for each in tree["sweep_arms"]}
    row = rows["bf16", 0.003]
    assert row["unstable"] == {"8": "diverged at step 20"} and set(row["losses"]) == {"7", "9"}
    assert (row["loss"], row["works"], row["best"]) == (None, False, False)
    assert arms["bf16"]["best"] == "optim.lr=0.001"
    assert arms["fp4"]["works"] == ["optim.lr=0.003", "optim.lr=0.01"]
    assert row["sharpness"] == pytest.approx(0.08) and rows["fp4", 0.03]["sharpness"] == pytest.approx(0.075)
    assert "Sharpness:\n\n| optim.lr | bf16 | fp4 |" in text and "| 0.03 | 0.0800 | 0.0750 |" in text
    assert "| 0.003 | unstable 1 of 3 |" in text and "bf16-lr_0.003-s8" not in text
    ends = {(r, s): losses("fp4", r, s) for r in RATES for s in SEEDS}
    ends[0.03, 9] += 3.0 * (1 - 1 / STEPS)  # the first loss that was logged
    best = np.mean([ends[0.01, seed] for seed in SEEDS])
    assert arms["fp4"]["sensitivity"] == pytest.approx(np.mean(list(ends.values())) - best)


def test_a_missing_seed_moves_no_mean(tmp_path):
    """Means are over all seeds of the arm's settings, as a seed that a setting lacks has an effect of its own."""

    def additive(arm, rate, seed):
        return 4.0 + 0.3 * math.log10(rate / AT[arm]) ** 2 + 0.05 * (seed - 8)

    tree, text = reported(tmp_path, missing=("fp4-lr_0.01-s9", "fp4-lr_0.001-s7"), loss=additive)
    rows = rows_of(tree)
    assert rows["fp4", 0.01]["loss"] == pytest.approx(4.0) and rows["fp4", 0.01]["seeds"] == [7, 8]
    assert rows["fp4", 0.001]["loss"] == pytest.approx(4.3)
    own = next(each for each in tree["sweep_arms"] if each["arm"] == "fp4")["own"]
    assert (own["nats"], own["freedom"]) == (pytest.approx(0.0), 1)
    assert " n=2**" in text and "not finished, not in any number: " in text


def test_an_arm_of_which_nothing_is_stable(tmp_path):
    """It has no best value; the arms beside it keep theirs, without a common value where it is the baseline."""
    everywhere = [f"bf16-lr_{rate}-s{SEEDS[0]}" for rate in RATES]
    tree, text = reported(tmp_path, diverged=everywhere)
    arms = {each["arm"]: each for each in tree["sweep_arms"]}
    assert (arms["bf16"]["best"], arms["bf16"]["works"], arms["bf16"]["sensitivity"]) == (None, [], None)
    assert arms["fp4"]["best"] == "optim.lr=0.01" and arms["fp4"]["own"] is arms["fp4"]["common"] is None
    assert (arms["bf16"]["edge"], arms["fp4"]["edge"]) == ("", "")
    assert "| bf16 | none of them | - | - | - | - | - |" in text


def test_a_best_value_at_the_end_of_the_grid_is_reported(tmp_path):
    tree, text = reported(tmp_path, diverged=("bf16-lr_0.003-s8", "fp4-lr_0.01-s7"), missing=("fp4-lr_0.003-s7",))
    assert [each["edge"] for each in tree["sweep_arms"]] == ["lowest", "highest"]
    assert "The lowest value that was tried is the best of bf16: " in text
    assert "The highest value that was tried is the best of fp4: " in text


def test_a_sweep_that_is_no_number_has_a_table_and_no_figure(tmp_path):
    blocks = [{"purpose": "sweep", "seeds": SEEDS, "axes": {"optim.eps": [1e-8], "optim.lr": RATES[:2]}}]
    made, planned, _ = swept(tmp_path, blocks=blocks)
    measured = measure.measure(made, *results.read(planned, tmp_path / "runs"))
    assert not figure.save_sweep(measured, tmp_path / "sweep.svg")
    assert (measured.sweep_arms[0].best, measured.sweep_arms[0].edge) == ("optim.eps=1e-08, optim.lr=0.003", "")
    text = report.to_markdown(measured, made, figure="")
    assert "| bf16 | optim.eps=1e-08, optim.lr=0.001; optim.eps=1e-08, optim.lr=0.003 | " in text
