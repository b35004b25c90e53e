"""A study of two arms and two seeds of llama_tiny on a CPU, through the real entry point: killed on the way, and gone
on with from a copy of its folder, it ends with the numbers of runs that were left alone.
"""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from lowprec_train.tools import cli
from tests.launches import Command, training
from tests.test_kill import numbers

RUNS = ("bf16-s1", "fp8-s1", "bf16-s2", "fp8-s2")


def study(output, out, small, *options):
    words = ("study", "run", "tiny", "--nproc", "2", "--out", out, *options, "--set", *small)
    return Command("lowprec", *words, output=output)


def until(holds, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, process.output.read_text()
        time.sleep(0.005)


def processes_in(folder):
    """Processes whose command line names the folder."""
    lines = (file for file in Path("/proc").glob("[0-9]*/cmdline"))
    found = []
    for file in lines:
        try:
            if str(folder).encode() in file.read_bytes() and b"study.job" in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            pass
    return found


def test_killed_copied_and_gone_on_with(small, tmp_path, capsys):
    out, moved = tmp_path / "here", tmp_path / "there"
    first = study(tmp_path / "first", out, small)
    until(lambda: (out / "fp8-s1" / "checkpoints" / "latest").exists(), first)
    first.kill()
    first.wait(60)
    deadline = time.monotonic() + 60
    while processes_in(out):
        assert time.monotonic() < deadline, "runs outlive their study"
        time.sleep(0.1)
    begun = {name: (out / name / "DONE").exists() for name in RUNS if (out / name).exists()}
    assert not all(begun.get(name) for name in RUNS)
    shutil.copytree(out, moved)

    second = study(tmp_path / "second", moved, small)
    told, _ = second.communicate()
    assert second.poll() == 0 and "4 runs in" in told and "4 done" in told, told
    assert "complete blocks, estimate: seeds 1, 2" in told
    for name in ("bf16-s1", "fp8-s2"):
        recipe, seed = name.split("-s")
        alone = training(
            tmp_path / f"{name}.output",
            *(f"+recipe={recipe}", f"seed={seed}", f"name={name}", f"run_root={tmp_path / 'alone'}", "device=cpu"),
            *("optim=adamw", "comm=fp32", "eval_interval=8", "logger=none", *small),
        )
        assert alone.wait(120) == 0, alone.output.read_text()
        assert numbers(moved / name) == numbers(tmp_path / "alone" / name)
    found = [json.loads((moved / name / "evaluation.json").read_text()) for name in RUNS]
    assert all(value > 0 for each in found for value in each["sharpness"].values())
    losses = [each["loss"] for each in found]
    assert losses[0]["run"] == losses[0]["bf16"] and losses[1]["run"] != losses[1]["bf16"]

    words = ("--out", str(moved), "--set", *small)
    assert cli.main(["study", "run", "tiny", "--nproc", "2", *words]) == 0  # begins nothing
    told = capsys.readouterr().out
    assert "(1 of 4)" not in told and "4 done" in told
    assert cli.main(["study", "report", "tiny", *words]) == 0
    stored = [json.loads((folder / "results.json").read_text()) for folder in (moved, moved / "report")]
    assert stored[0] == stored[1] and set(stored[0]["runs"]) == set(RUNS)


@pytest.mark.nightly
def test_the_time_is_over_and_a_run_that_cannot_begin(small, tmp_path, capsys):
    """Running ones save, the command ends with 0 and says what is left. Then the data has gone: status 1. A run that
    was copied without its checkpoints begins again.
    """
    out = tmp_path / "out"
    process = study(tmp_path / "output", out, (*small, "steps=4000"), "--arms", "bf16")
    until(lambda: (out / "bf16-s1" / "checkpoints" / "latest").exists(), process)
    process.send_signal(signal.SIGTERM)  # as the budget does
    told, _ = process.communicate()
    assert process.poll() == 0 and "not finished: bf16-s1, bf16-s2" in told, told
    assert json.loads((out / "bf16-s1" / "PREEMPTED").read_text())["step"] < 4000
    shutil.rmtree(out / "bf16-s1" / "checkpoints")
    words = (
        "study",
        "run",
        "tiny",
        "--nproc",
        "2",
        "--arms",
        "bf16",
        "--minutes",
        "3",
        "--out",
        str(out),
        "--set",
        *small,
    )
    gone = [each for each in words if "data.root" not in each]
    assert cli.main([*gone, "steps=4000", "+data.root=/nowhere"]) == 2
    assert "study tiny, run bf16-s1: /nowhere" in capsys.readouterr().err
    assert cli.main([*words, "steps=4000", "optim.lr=0.5"]) == 1  # another run than the one that began
    told = capsys.readouterr().out
    assert "bf16-s1: its checkpoints are missing" in told and "bf16-s2: its checkpoints" not in told
    assert "bf16-s2 failed:\n" in told and "optim.lr: saved 0.001, now 0.5" in told


@pytest.mark.nightly
def test_a_study_of_forks(small, tmp_path):
    """The trunk is trained first, and the forks end as the runs of test_forking do."""
    file = tmp_path / "branch.yaml"
    file.write_text(
        "name: branch\noverrides: [optim=adamw, comm=fp32, optim/schedule=wsd, logger=none]\narms: {bf16: , fp8: }\n"
        "blocks: [{purpose: estimate, seeds: [3], fork: {arm: bf16, step: 20}}]\nkeep_checkpoints: false\n"
    )
    out = tmp_path / "out"
    words = ("study", "run", file, "--nproc", "2", "--out", out, "--set", *small, "checkpoint_interval=7")
    process = Command("lowprec", *words, output=tmp_path / "output")
    told, _ = process.communicate()
    assert process.poll() == 0 and "3 done" in told, told
    assert numbers(out / "bf16-from20-s3") == numbers(out / "bf16-trunk20-s3")
    assert not list(out.glob("*/checkpoints"))
