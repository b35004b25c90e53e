"""Reading run directories as they are found, torn and resumed ones too."""

import json

import numpy as np
import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.compare.runs import LOSS, VALID, read_runs


def test_reads_all_series(make_run):
    run, other = read_runs([make_run("bf16", [3.0, 2.5, 2.0], valid={2: 2.75}), make_run("fp4", [3.0])])
    assert run.loss.steps.tolist() == [1, 2, 3] and run.loss.values.tolist() == [3.0, 2.5, 2.0]
    assert run.series(VALID).steps.tolist() == [2] and run.series(VALID).values.tolist() == [2.75]
    assert run.series("data/tokens").values.tolist() == [4096, 8192, 12288]
    assert len(run.series("never/logged").values) == 0
    assert (run.label, run.recipe, run.status, run.unigram_entropy) == ("bf16", "bf16", "done", 6.0)
    assert run.config == {"name": "bf16", "seed": 1, "precision.name": "bf16"}
    assert other.notes == ()


@pytest.mark.parametrize("tail", ['{"step": 3, "train/lo', '{"step": 3', '{"step": 3, "train/loss": "\xe9', "\x00\x00"])
def test_torn_last_line_is_left_out_and_said(make_run, tail):
    run = read_runs([make_run("bf16", [3.0, 2.5], tail=tail), make_run("fp4", [3.0])])[0]
    assert run.loss.steps.tolist() == [1, 2]
    assert run.notes == ("unreadable lines of metrics.jsonl are left out: 3",)


def test_whole_last_line_without_newline_counts(make_run):
    run = read_runs([make_run("bf16", [3.0], tail='{"step": 2, "train/loss": 2.5}'), make_run("fp4", [3.0])])[0]
    assert run.loss.values.tolist() == [3.0, 2.5] and run.notes == ()


def test_resumed_steps_replace_the_first_ones(make_run):
    again = '{"step": 2, "train/loss": 2.25}\n{"step": 3, "train/loss": 1.75}\n{"step": 4, "train/loss": 1.5}\n'
    run = read_runs([make_run("bf16", [3.0, 2.5, 2.0], valid={2: 9.0}, tail=again), make_run("fp4", [3.0])])[0]
    assert run.loss.steps.tolist() == [1, 2, 3, 4]
    assert run.loss.values.tolist() == [3.0, 2.25, 1.75, 1.5]
    assert run.series(VALID).values.tolist() == [9.0]
    assert run.notes == ("2 steps were logged again after a resume; the last values are used",)


def test_separate_evaluation_lines_are_no_repetition(make_run):
    run = read_runs([make_run("bf16", [3.0], tail='{"step": 1, "valid/loss": 3.5}\n'), make_run("fp4", [3.0])])[0]
    assert run.loss.values.tolist() == [3.0] and run.series(VALID).values.tolist() == [3.5] and run.notes == ()


def test_non_finite_values_stay(make_run):
    tail = '{"step": 3, "train/loss": null}\n{"step": 4, "train/loss": Infinity}\n'
    run = read_runs([make_run("bf16", [3.0, float("nan")], tail=tail), make_run("fp4", [3.0])])[0]
    assert np.array_equal(run.loss.values, [3.0, np.nan, np.nan, np.inf], equal_nan=True)


def test_runs_of_one_name_are_told_apart_by_path(make_run):
    paths = [make_run("a/fp4", [3.0]), make_run("b/fp4", [3.0])]
    assert [run.label for run in read_runs(paths)] == [str(path) for path in paths]


def test_reports_among_the_runs_are_left_out(make_run, tmp_path):
    paths = [make_run("bf16", [3.0]), make_run("fp4", [3.0])]
    report = tmp_path / "runs" / "comparison"
    report.mkdir()
    (report / "report.json").write_text("{}")
    assert [run.label for run in read_runs([*paths, report])] == ["bf16", "fp4"]


def spoil(path, file, text):
    (path / file).unlink()
    if text is not None:
        (path / file).write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", None, "no run.json"),
        ("run.json", "{", "run.json cannot be read"),
        ("run.json", '{"name": "fp4"}', "has no corpus_hash"),
        ("run.json", '{"corpus_hash": "a", "deviations": 3}', "run.json: deviations is 3, not a list; restore it"),
        ("run.json", '{"corpus_hash": "a", "device": [3]}', "device is .*, not a text; restore it"),
        ("run.json", '{"corpus_hash": "a", "parameters": "x"}', "parameters is .*, not a whole number; restore it"),
        ("config.yaml", None, "no config.yaml"),
        ("config.yaml", "a: [1", "config.yaml is not YAML"),
        ("metrics.jsonl", None, "no metrics.jsonl"),
        ("metrics.jsonl", "", f"no {LOSS} in"),
        ("metrics.jsonl", '{"step": 1, "valid/loss": 2}\n', f"no {LOSS} in"),
        ("metrics.jsonl", "not json\n", f"no {LOSS} in"),
    ],
)
def test_incomplete_directories_are_one_clear_line(make_run, file, text, message):
    good, bad = make_run("bf16", [3.0]), make_run("fp4", [3.0])
    spoil(bad, file, text)
    with pytest.raises(ValueError, match=message) as error:
        read_runs([good, bad])
    assert str(bad) in str(error.value) and "\n" not in str(error.value)


def test_different_corpora_are_refused_with_both_hashes(make_run):
    paths = [make_run("bf16", [3.0], corpus_hash="aaaa1111"), make_run("fp4", [3.0], corpus_hash="bbbb2222")]
    with pytest.raises(ValueError, match=r"bf16 has corpus hash aaaa1111, fp4 has bbbb2222"):
        read_runs(paths)


def test_needs_two_different_runs(make_run, tmp_path):
    run = make_run("bf16", [3.0])
    with pytest.raises(ValueError, match="at least two runs, got 1"):
        read_runs([run])
    with pytest.raises(ValueError, match="given twice"):
        read_runs([run, run.parent / "." / "bf16"])
    with pytest.raises(ValueError, match=r"no such run directory: .*absent"):
        read_runs([run, tmp_path / "absent"])


def test_unknown_fields_default(make_run):
    path = make_run("fp4", [3.0], done=False)
    (path / "run.json").write_text(json.dumps({"corpus_hash": "c0ffee"}))
    (path / "PREEMPTED").touch()
    run = read_runs([make_run("bf16", [3.0]), path])[1]
    assert (run.label, run.recipe, run.unigram_entropy, run.status) == ("fp4", "unknown", None, "preempted")


@pytest.mark.parametrize(("every", "ended", "complete"), [(1, 8, False), (1, 5, True), (4, 6, False), (4, 5, True)])
def test_a_finished_run_that_lost_metrics_is_incomplete(make_run, tmp_path, capsys, every, ended, complete):
    """Its last losses are of earlier steps: the gate fails, also where all runs lost the same steps. The last step is
    logged whatever `log_interval` is.
    """
    for name in ("bf16", "fp4"):
        run = make_run(name, [3.0, 2.9, 2.8, 2.7, 2.6], config=f"log_interval: {every}\n")
        (run / "DONE").write_text(json.dumps({"step": ended}))
    found = read_runs([tmp_path / "runs" / "bf16", run])[0]
    lost = f"metrics.jsonl ends at step 5, but the run ended at step {ended}: lines are missing"
    assert (found.status, found.notes) == (("done", ()) if complete else ("incomplete", (lost,)))
    command = ["compare", *map(str, (tmp_path / "runs").iterdir()), "--out", str(tmp_path / "out"), "--max-gap", "1"]
    assert cli.main(command) == (0 if complete else 1)
    assert complete or f"fp4: {lost}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("DONE", "", "DONE cannot be read"),
        ("DONE", '{"step": "5"}', "DONE: step is '5', not a whole number"),
        (
            "run.json",
            '{"corpus_hash": "c0ffee", "valid_unigram_entropy": "x"}',
            "run.json: valid_unigram_entropy is 'x'",
        ),
    ],
)
def test_a_damaged_file_is_named(make_run, name, content, says):
    runs = [make_run(each, [3.0, 2.9]) for each in ("bf16", "fp4")]
    (runs[1] / name).write_text(content)
    with pytest.raises(ValueError, match=says) as error:
        read_runs(runs)
    assert str(runs[1]) in str(error.value)


def test_a_step_that_is_too_large_makes_an_unreadable_line(make_run):
    runs = [make_run("bf16", [3.0, 2.9]), make_run("fp4", [3.0, 2.9], tail='{"step": 1e400}\n')]
    assert read_runs(runs)[1].notes == ("unreadable lines of metrics.jsonl are left out: 3",)
