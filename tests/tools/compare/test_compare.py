"""`lowprec compare` from the command line: its numbers, its three files, its verdict and its complaints."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.compare import plot

N = 100


@pytest.fixture(autouse=True)
def no_figure(monkeypatch):
    """Drawing takes a second, and test_plot.py looks at it."""
    monkeypatch.setattr(plot, "save", lambda comparison, runs, target: target.touch())


def losses(gap=0.0, n=N):
    """A falling curve with noise that all runs share; all in 1/1024ths, so a gap in 1/64ths is exact."""
    rng = np.random.default_rng(3)
    noise = np.round(rng.standard_normal(N) * 64)[:n] / 1024
    return np.round(1024 * (4 + 3 * np.exp(-np.arange(n) / 20))) / 1024 + noise + gap


def compare(*arguments):
    """Exit status of the command."""
    return cli.main(["compare", *map(str, arguments)])


def report(runs, *options):
    """(exit status, report.json) of a comparison."""
    status = compare(*runs, *options)
    return status, json.loads((runs[0].parent / "comparison" / "report.json").read_text())


def row(found, name):
    return next(each for each in found["runs"] if each["name"] == name)


@pytest.fixture
def pair(make_run):
    """bf16 and fp4 whose loss is 1/64 above it, 3/64 in the last 20 steps; held out 1/8 above."""
    gap = np.where(np.arange(N) < N - 20, 1 / 64, 3 / 64)
    return [
        make_run("bf16", losses(), valid={50: 4.5, 100: 4.25}),
        make_run("fp4", losses(gap), valid={50: 5.0, 100: 4.375}, rate=500.0),
    ]


def test_gap_equals_the_hand_computed_one(pair):
    status, found = report(pair, "--smooth", 20)
    fp4, final = row(found, "fp4"), losses()[-20:].mean()
    assert status == 0 and found["baseline"] == "bf16" and found["window"] == 20
    for matched, bounds in (("gap_steps", [81, 100]), ("gap_tokens", [81 * 4096, 100 * 4096])):
        gap = fp4[matched]
        assert gap["nats"] == {"mean": 3 / 64, "low": 3 / 64, "high": 3 / 64, "points": 20}
        assert gap["percent"] == pytest.approx(100 * 3 / 64 / final, rel=1e-12)
        assert [gap["first"], gap["last"]] == bounds
    assert fp4["final_loss"]["mean"] == pytest.approx(final + 3 / 64, rel=1e-12)
    assert fp4["validation"] == {
        "loss": 4.375,
        "step": 100,
        "gap": 0.125,
        "gap_percent": pytest.approx(100 * 0.125 / 4.25),
        "gap_step": 100,
    }
    assert row(found, "bf16")["gap_steps"] is None and row(found, "bf16")["validation"]["gap"] is None
    assert fp4["tokens_per_second"] == 500.0 and fp4["peak_memory_gib"] == pytest.approx(1.1)


def test_a_wider_window_mixes_both_gaps(pair):
    _, found = report(pair, "--smooth", 40)
    assert row(found, "fp4")["gap_steps"]["nats"]["mean"] == 2 / 64


def test_gap_curve_is_the_difference_at_every_matched_step(pair):
    curve = row(report(pair, "--smooth", 20)[1], "fp4")["gap_curve"]
    assert curve["steps"] == list(range(1, N + 1))
    assert curve["gap"] == [1 / 64] * 80 + [3 / 64] * 20
    assert curve["smoothed"][79] == pytest.approx(1 / 64) and curve["smoothed"][89] == pytest.approx(2 / 64)


def test_matched_tokens_stay_fair_when_batch_sizes_differ(make_run):
    """The same straight line over tokens, logged at half the batch size: no gap at tokens, a large one at steps."""
    line = lambda tokens: 5 - tokens / 4096 / 100  # noqa: E731
    wide = make_run("bf16", [line(4096 * step) for step in range(1, 101)])
    narrow = make_run("fp4", [line(2048 * step) for step in range(1, 201)], tokens_per_step=2048)
    fp4 = row(report([wide, narrow], "--smooth", 10)[1], "fp4")
    assert fp4["gap_tokens"]["nats"]["mean"] == pytest.approx(0, abs=1e-12)
    assert fp4["gap_tokens"]["last"] == 100 * 4096
    assert fp4["gap_steps"]["nats"]["mean"] == pytest.approx(0.955 / 2, abs=1e-9)


def test_another_log_interval_changes_no_number(make_run):
    """The same losses, logged in each step and in each tenth: no gap in either order, and equal final losses."""
    every, tenth = make_run("bf16", losses()), make_run("fp4", losses())
    lines = (tenth / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tenth / "metrics.jsonl").write_text("".join(lines[9::10]))
    for baseline in ("bf16", "fp4"):
        status, found = report([every, tenth], "--baseline", baseline, "--max-gap", "0", "--smooth", 5)
        one, other = row(found, "bf16"), row(found, "fp4")
        assert status == 0 and one["final_loss"] == other["final_loss"]
        measured = other if baseline == "bf16" else one
        assert measured["gap_tokens"]["nats"]["mean"] == measured["gap_steps"]["nats"]["mean"] == 0.0
        assert measured["speed"]["at_loss"] == pytest.approx(measured["speed"]["raw"])
        assert "multiples of 10 steps" in one["notes"][0] and not other["notes"] and one["last_step"] == N


def test_speed_at_equal_loss_charges_for_slower_learning(make_run):
    """fp4 is 1.5 times as fast but needs 100 steps for the loss that bf16 has after 80: at it, 1.2 times as fast."""
    falling = 5 - np.arange(1, 101) / 128
    slower = 5 - np.arange(1, 101) * 0.8 / 128
    runs = [make_run("bf16", falling, rate=1000.0), make_run("fp4", slower, rate=1500.0)]
    speed = row(report(runs, "--smooth", 1)[1], "fp4")["speed"]
    assert speed == {"raw": 1.5, "at_loss": pytest.approx(1.2), "loss": slower[-1]}


def test_seeds_are_blocks_and_say_what_they_cannot_rank(make_run, capsys):
    """Three seeds of three recipes: the gap of a paired design, and `not resolved` where its interval holds 0."""
    noise = {"bf16": (0, 2, -2), "fp8": (1, -1, 0), "fp4": (1, 1, -2)}
    ends = {
        (recipe, seed): 4 + seed / 4 + (0.125 if recipe == "fp4" else 0) + noise[recipe][seed] / 512
        for recipe in noise
        for seed in range(3)
    }
    runs = [
        make_run(f"{recipe}-{seed}", losses(), valid={100: loss}, recipe=recipe, config=f"seed: {seed}\n")
        for (recipe, seed), loss in ends.items()
    ]
    for run in runs:  # one name of the precision for all seeds, and one seed a file
        text = (run / "config.yaml").read_text().replace("seed: 1\n", "", 1)
        (run / "config.yaml").write_text(text.replace(f"name: {run.name}}}", f"name: {run.name[:-2]}}}"))
    _, found = report(runs)
    over = found["over_seeds"]
    table = np.array([[ends[recipe, seed] for seed in range(3)] for recipe in noise])
    residuals = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    s = np.sqrt((residuals**2).sum() / 4)
    assert over["s"] == pytest.approx(s) and over["freedom"] == 4 and over["loss"] == "validation, step 100"
    fp8, fp4 = over["gaps"]
    assert fp4["words"] == "above" and fp4["nats"] == pytest.approx(0.125) and fp4["seeds"] == 3
    half = 2.7764451 * s * np.sqrt(2 / 3)
    assert fp8["high"] - fp8["nats"] == pytest.approx(half) and fp8["words"] == f"not resolved at ± {half:.4f}"
    assert f"not resolved at ± {half:.4f}" in capsys.readouterr().out


def test_one_seed_ranks_nothing(pair, capsys):
    _, found = report(pair)
    assert found["over_seeds"]["gaps"] == [] and "nothing is ranked" in found["over_seeds"]["note"]
    assert "Over seeds: one seed of each configuration" in capsys.readouterr().out


def test_gate_is_two_sided_and_inclusive(make_run):
    base, above, below = (make_run(name, losses(gap)) for name, gap in (("bf16", 0), ("fp4", 1 / 8), ("fp8", -1 / 8)))
    for other in (above, below):
        assert compare(base, other, "--max-gap", 0.125) == 0
        assert compare(base, other, "--max-gap", 0.124) == 1
        assert compare(base, other) == 0


def test_gate_holds_the_held_out_gap_too(pair, capsys):
    assert compare(*pair, "--max-gap", 0.125) == 0
    assert "passed; the largest gap is 0.1250 (fp4, validation)" in capsys.readouterr().out
    status, found = report(pair, "--max-gap", 0.1)
    assert status == 1 and found["passed"] is False
    assert found["failures"] == ["fp4: gap of +0.1250 nat, validation"]
    assert "FAILED" in capsys.readouterr().out


def test_gate_refuses_a_run_that_stopped_early(make_run):
    base, other = make_run("bf16", losses()), make_run("fp4", losses(n=60), done=False)
    status, found = report([base, other], "--max-gap", 1)
    assert status == 1 and found["failures"] == ["fp4: unfinished at step 60, others are at 100"]
    (other / "DONE").write_text(json.dumps({"step": 60}))
    assert compare(base, other, "--max-gap", 1) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_losses_are_shown_and_fail_the_gate(make_run, capsys, value):
    spoiled = losses()
    spoiled[[10, 95]] = value
    status, found = report([make_run("bf16", losses()), make_run("fp4", spoiled)], "--smooth", 20, "--max-gap", 1)
    fp4, shown = row(found, "fp4"), str(value)
    assert status == 1 and fp4["nonfinite_steps"] == [11, 96]
    assert fp4["final_loss"]["mean"] == fp4["gap_steps"]["nats"]["mean"] == fp4["gap_curve"]["gap"][10] == shown
    assert f"fp4: gap of {shown} nat, matched steps" in found["failures"]
    assert "2 (at 11, 96)" in capsys.readouterr().out


def test_a_non_finite_step_before_the_window_does_not_spoil_it(make_run):
    spoiled = losses(1 / 64)
    spoiled[10] = math.nan
    status, found = report([make_run("bf16", losses()), make_run("fp4", spoiled)], "--smooth", 20, "--max-gap", 0.1)
    assert status == 0 and row(found, "fp4")["gap_steps"]["nats"]["mean"] == 1 / 64


@pytest.mark.parametrize(("entropy", "below"), [(6.0, True), (4.3, False), (1.0, False), (None, None)])
def test_unigram_entropy_verdict(make_run, capsys, entropy, below):
    """fp4 ends at about 4.02 + 1/64 on training text, at 4.375 held out."""
    facts = {"valid_unigram_entropy": entropy}
    runs = [
        make_run("bf16", losses(), valid={100: 4.2}, **facts),
        make_run("fp4", losses(1 / 64), valid={100: 4.375}, **facts),
    ]
    _, found = report(runs)
    assert found["all_below_unigram"] is below and found["unigram_entropy"] == entropy
    out = capsys.readouterr().out
    assert {True: "every loss is below it", False: "NOT below it: ", None: "not recorded"}[below] in out
    assert entropy is None or f"{entropy:.4f} nats per token" in out


def test_configuration_differences(make_run):
    runs = [
        make_run("bf16", losses(), config="optim: {lr: 0.001}\ncheckpoint_keep: 2\nrun_root: a\n"),
        make_run("fp4", losses(), config="optim: {lr: 0.002}\ncheckpoint_keep: 3\nrun_root: b\ncomm: {payload: fp8}\n"),
    ]
    _, found = report(runs)
    assert found["differences"] == {
        "comm.payload": {"bf16": "(absent)", "fp4": "fp8"},
        "checkpoint_keep": {"bf16": 2, "fp4": 3},
        "optim.lr": {"bf16": 0.001, "fp4": 0.002},
        "precision.name": {"bf16": "bf16", "fp4": "fp4"},
    }
    assert found["uncontrolled"] == ["optim.lr"]


def test_deviations_are_footnotes_and_overrides_are_listed(make_run, capsys):
    runs = [
        make_run("bf16", losses()),
        make_run("fp4", losses(), deviations=["no residual"], overrides=["precision.override.dgrad.a.format=E4M3"]),
        make_run("mxfp4", losses(), deviations=["no residual", "scales rounded down"]),
    ]
    compare(*runs)
    text = (runs[0].parent / "comparison" / "report.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| fp4[^1] " in text and "| mxfp4[^1][^2] " in text and "| bf16 " in text
    assert "[^1]: Not as published: no residual\n[^2]: Not as published: scales rounded down" in text
    assert "- fp4: `precision.override.dgrad.a.format=E4M3`" in text


def test_markdown_tables_are_well_formed(pair, capsys):
    compare(*pair)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    tables = [rows[i : i + 4] for i in (0, 4)]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1 and len({len(line) for line in table}) == 1


def test_runs_without_tokens_or_rates_compare_at_steps(make_run):
    runs = [make_run(name, [1.0]) for name in ("bf16", "fp4")]
    for path, loss in zip(runs, (3.0, 3.5)):
        (path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "train/loss": {loss}}}\n' for i in range(40)))
    status, found = report(runs, "--max-gap", 0.5)
    fp4 = row(found, "fp4")
    assert status == 0 and fp4["gap_steps"]["nats"]["mean"] == 0.5
    assert (
        fp4["gap_tokens"] is fp4["speed"] is fp4["tokens_per_second"] is fp4["last_tokens"] is fp4["validation"] is None
    )


def test_baseline_is_the_first_bf16_run_or_the_named_one(make_run):
    runs = [make_run("fp8", losses(1 / 8)), make_run("base", losses(), recipe="bf16"), make_run("fp4", losses(1 / 4))]
    _, found = report(runs)
    assert found["baseline"] == "base" and row(found, "fp4")["gap_steps"]["nats"]["mean"] == 1 / 4
    _, found = report(runs, "--baseline", "fp8")
    assert found["baseline"] == "fp8" and row(found, "base")["gap_steps"]["nats"]["mean"] == -1 / 8


def test_default_window_is_a_tenth_within_bounds(make_run):
    base = np.full(1000, 3.0)
    for name, n, window in (("short", 12, 12), ("demo", 240, 30), ("longer", 700, 70)):
        assert report([make_run(f"bf16-{name}", base), make_run(name, base[:n])])[1]["window"] == window


def test_glob_over_the_folder_works_the_second_time(pair):
    folder = pair[0].parent
    (folder / "study" / "short").mkdir(parents=True)
    (folder / "study" / "short" / "seeds.json").write_text("{}")
    for _ in range(2):
        assert compare(*sorted(folder.iterdir())) == 0
    assert sorted(path.name for path in (folder / "comparison").iterdir()) == ["curves.png", "report.json", "report.md"]


def test_out_directory(pair, tmp_path):
    out = tmp_path / "deep" / "er"
    assert compare(*pair, "--out", out) == 0
    assert json.loads((out / "report.json").read_text())["definitions"]["train loss"].startswith("mean of the last 30")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "fp9"], "no run is called 'fp9'; the runs are bf16, fp4"),
        (["/nowhere/run"], "no such run directory: /nowhere/run"),
    ],
)
def test_bad_input_is_one_line_and_status_2(pair, capsys, arguments, message):
    assert compare(*pair, *arguments) == 2
    error = capsys.readouterr().err
    assert error == f"lowprec compare: error: {message}\n"


def test_different_corpora_are_refused(make_run, capsys):
    runs = [make_run("bf16", losses()), make_run("fp4", losses(), corpus_hash="0ddba11")]
    assert compare(*runs, "--max-gap", 9) == 2
    error = capsys.readouterr().err
    assert "c0ffee" in error and "0ddba11" in error and error.count("\n") == 1
    assert not (runs[0].parent / "comparison").exists()


def test_no_common_steps_are_refused(make_run, capsys):
    assert compare(make_run("bf16", losses()), make_run("fp4", losses(), first=101)) == 2
    assert "fp4 and bf16 have no common steps: 101 to 200 against 1 to 100" in capsys.readouterr().err


def test_unwritable_out_is_one_line(pair, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert compare(*pair, "--out", tmp_path / "file") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("option", [["--max-gap", "nan"], ["--max-gap", "-1"], ["--max-gap", "x"], ["--smooth", "0"]])
def test_wrong_options_exit_2_with_the_value(pair, capsys, option):
    with pytest.raises(SystemExit) as end:
        compare(*pair, *option)
    assert end.value.code == 2 and repr(option[1]) in capsys.readouterr().err


def test_help_explains_the_gate(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    for word in (
        "--max-gap",
        "--baseline",
        "--smooth",
        "--out",
        "exit status",
        "matched steps",
        "lowprec compare runs/",
    ):
        assert word in out


def test_version_and_missing_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("lowprec_train 0.")
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2 and "COMMAND" in capsys.readouterr().err


def test_module_entry_point_returns_the_status(pair):
    command = [sys.executable, "-m", "lowprec_train.tools.cli", "compare", *map(str, pair), "--max-gap", "0.001"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "FAILED" in ended.stdout and ended.stderr == ""
