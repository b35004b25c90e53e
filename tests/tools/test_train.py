"""`lowprec train` in one process and in two: signals, a killed rank, mistakes, and the losses of train.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lowprec_train.tools import cli, train
from lowprec_train.train import processes
from lowprec_train.train.diagnostics import failure
from lowprec_train.train.processes import Rank
from tests.launches import Command, environment, training
from tests.test_main_interruption import STEPS, arguments, losses, wait_for_steps
from tests.test_main_parallel import EXACT

__all__ = ["arguments"]
LOWPREC = (sys.executable, "-c", "import sys; from lowprec_train.tools.cli import main; sys.exit(main())", "train")


@pytest.fixture(scope="module")
def command(arguments):
    """Overrides of a run whose losses do not depend on the layout."""
    return (*arguments, *EXACT)


def children(process):
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def rank_of(pid):
    values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(value[5:]) for value in values if value.startswith(b"RANK=")), None)


def ends(process):
    """(status, stdout, stderr)."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def interrupted(run, process, after, number):
    """Signal the process group, as a terminal does, after so many steps; the step that was saved."""
    wait_for_steps(run, after, process)
    os.killpg(process.pid, number)
    status, out, err = ends(process)
    assert status == 0, err
    saved = json.loads((run / "PREEMPTED").read_text())
    assert saved["signal"] == number.name and after <= saved["step"] < STEPS and "preempted at step" in out
    assert err.count("Interrupted: the run saves") == (number == signal.SIGINT) and err.count("\n") <= 2
    return saved["step"]


def in_a_group(*command):
    """A process that leads a process group, as a shell makes one of each command."""
    words = [str(word) for word in command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment(), start_new_session=True, **pipes)


def test_two_processes_through_signals_and_a_kill(command, tmp_path):
    """Ctrl-C, SIGTERM and a killed rank; the rest in one process. All numbers are those of train.py, undisturbed."""
    train_here, run = (*LOWPREC, *command, f"run_root={tmp_path}"), tmp_path / "run"
    two = (*LOWPREC, "--nproc", "2", *train_here[len(LOWPREC) :])
    step = interrupted(run, in_a_group(*two), 5, signal.SIGINT)
    step = interrupted(run, in_a_group(*two), step + 5, signal.SIGTERM)

    launcher = in_a_group(*two)
    wait_for_steps(run, step + 15, launcher)
    (second,) = (child for child in children(launcher) if rank_of(child) == 1)
    os.kill(second, signal.SIGKILL)
    status, out, err = ends(launcher)
    assert status == 1 and f"resuming after step {step}" in out
    assert err.count("\n") == 1 and err.startswith("error: rank 1 was ended by SIGKILL")

    output, errors = tmp_path / "rest", tmp_path / "errors"
    rest = Command("lowprec", "train", *train_here[len(LOWPREC) :], output=output, errors=errors)
    assert (rest.wait(240), errors.read_text()) == (0, "") and "resuming after step" in output.read_text()
    reference = training(tmp_path / "output", *command, f"run_root={tmp_path / 'reference'}")
    assert reference.wait(240) == 0, reference.output.read_text()
    assert losses(run) == losses(tmp_path / "reference" / "run") and len(losses(run)) == STEPS


@pytest.mark.parametrize("options", [(), ("--nproc", "2")])
def test_a_second_interrupt_aborts_and_says_what_stands(command, tmp_path, options):
    long_steps = ("tokens_per_step=20480", "checkpoint_interval=1", "checkpoint_async=false")
    process = in_a_group(*LOWPREC, *options, *command, *long_steps, f"run_root={tmp_path}")
    wait_for_steps(tmp_path / "run", 2, process)
    os.killpg(process.pid, signal.SIGINT)
    told = [process.stderr.readline() for _ in range(2)]
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = ends(process)
    assert status == 1 and told[1].startswith("Interrupted: the run saves") and err.count("\n") == 1
    saved = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert err.startswith("aborted by a second interrupt; ") and f"{Path('run', 'checkpoints', saved)} is intact" in err
    assert not (tmp_path / "run" / "PREEMPTED").exists()


@pytest.mark.parametrize("options", [(), ("--nproc", "2")])
def test_an_interrupt_before_the_run_begins(command, tmp_path, options):
    """Python and torch are still starting: nothing is lost by waiting for them, and nobody sees a trace."""
    process = in_a_group(*LOWPREC, *options, *command, f"run_root={tmp_path}")
    wait_until(lambda: blocks_interrupts(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    status, _, err = ends(process)
    assert status == 0 and "Traceback" not in err
    assert not (tmp_path / "run" / "DONE").exists()


def blocks_interrupts(pid):
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return bool(int(mask.split()[1], 16) & 1 << signal.SIGINT - 1)


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("tokens_per_step=300", "error: tokens_per_step=300 is not a multiple of "),
        ("stepz=3", "Could not override 'stepz'"),
    ],
)
def test_a_mistake_of_all_processes_is_reported_once(tmp_path, mistake, message):
    status, out, err = ends(in_a_group(*LOWPREC, "--nproc", "2", mistake, f"run_root={tmp_path}"))
    assert status == 1 and err.count(message) == 1 and err.index(message) <= len("error: ") and "Traceback" not in err
    assert out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nproc", "0"), "--nproc 0: must be at least 1"),
        (("--gpus", "3"), "--gpus 3: must be a number from 1 to 2"),
        (("--gpus", "0"), "--gpus 0: must be a number from 1 to 2"),
        (("--gpus", "two"), "--gpus two: must be a number from 1 to 2"),
    ],
)
def test_processes_that_a_machine_cannot_have(capsys, monkeypatch, words, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.main(["train", *words, "+recipe=fp4"]) == 1
    assert message in capsys.readouterr().err


def test_without_gpus_it_says_what_there_is(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["train", "--gpus", "all"]) == 1
    assert capsys.readouterr().err.startswith("error: --gpus all: torch sees no GPU on this machine; --nproc N ")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert train.gpus("all") == 4


def test_under_another_launcher_it_starts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", "--nproc", "2"]) == 1
    assert "WORLD_SIZE=4: a launcher has started this process" in capsys.readouterr().err


def test_what_is_not_ours_goes_to_hydra_in_order():
    parsed = cli.parse(["train", "+recipe=fp4", "--cfg", "job", "--nproc", "2", "--multirun", "seed=1,2", "-h"])
    assert parsed.nproc == 2 and parsed.overrides == ["+recipe=fp4", "--cfg", "job", "--multirun", "seed=1,2", "-h"]
    with pytest.raises(SystemExit):
        cli.parse(["compare", "a", "b", "--unknown"])


def test_the_cause_is_reported_and_not_what_follows_from_it(tmp_path, monkeypatch):
    """Rank 0 loses its peer and dies of it; what ended first is the message."""
    ranks = [Rank(number, Ended(status), tmp_path / str(number)) for number, status in enumerate((1, 1, -6))]
    for rank, text in zip(ranks, ("error: connection lost", "error on rank 1: disk full", None), strict=True):
        rank.folder.mkdir()
        (rank.folder / "output").write_text("terminate called")
        if text:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank.folder / "error.json"))
            monkeypatch.setenv("LOWPREC_LAUNCHER", "1")
            failure.report(text)
            os.utime(rank.folder / "error.json", (0, 100 - rank.number))
    assert processes.cause(ranks) == "error on rank 1: disk full"
    ranks[2].process.status = -9
    assert processes.cause(ranks) == "error on rank 1: disk full", "ranks that hang are killed by those that report"
    (ranks[0].folder / "error.json").unlink()
    (ranks[1].folder / "error.json").unlink()
    assert processes.cause(ranks).startswith("error: rank 2 was ended by SIGKILL")
    ranks[2].process.status = -6
    assert "rank 2 was ended by SIGABRT" in processes.cause(ranks) and "terminate called" in processes.cause(ranks)


class Ended:
    """A process that has ended."""

    def __init__(self, status):
        self.status = status

    def poll(self):
        return self.status
