"""Ranks that differ, hang or lose their launcher: the run ends soon, with one error that says which rank, and why."""

import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.launches import ROOT
from tests.test_main_interruption import TORCHRUN, arguments, start, wait_for_steps
from tests.test_main_parallel import workers

__all__ = ["arguments"]
DIFFERING = ROOT / "tests" / "differing_ranks.py"
SECONDS = 6


def ended(process):
    """Whether a process runs no more."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def errors(err):
    """What the ranks wrote, without torchrun's lines."""
    own = err.split("\nTraceback")[0].splitlines()
    return [line for line in own if not re.match(r"([WE]\d{4} |\[|\*{5}|Setting OMP)", line)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("1:max_grad_norm=0.5", "1:run_root=elsewhere", "1:parallel.timeout_minutes=3", "1:logger=tensorboard"),
            ("max_grad_norm: 1.0 on rank 0; 0.5 on rank 1", "timeout_minutes: 10.0 on rank 0; 3.0 on", "run_root: /"),
        ),
        (("1:model.nosuch=3",), ("Could not override 'model.nosuch' by model.nosuch=3", "(rank 1 only)")),
        pytest.param(
            ("0:steps=none",),
            ("Value 'none' of type 'str' could not be converted to Integer", "(rank 0 only)"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("model.nosuch=3",), ("Could not override 'model.nosuch' by model.nosuch=3",), marks=pytest.mark.nightly
        ),
    ],
)
def test_ranks_that_differ(arguments, tmp_path, words, said):
    """One error from one rank, and no run directory."""
    words = ("tokens_per_step=128", f"run_root={tmp_path / 'runs'}", *words)
    agent = start((*TORCHRUN, "2", DIFFERING, *arguments, *words))
    _, err = agent.communicate(timeout=240)
    assert agent.returncode == 1
    told = "\n".join(errors(err))
    assert told.count("error: ") == 1 and "error on rank" not in told, told
    assert all(part in told for part in said), told
    assert ("(rank" in told) == ("(rank" in "".join(said))
    assert not (tmp_path / "runs").exists() and not Path("elsewhere").exists()


@pytest.mark.parametrize("hung", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_that_hangs(arguments, tmp_path, hung):
    """Stopped in the middle of training: the others name it, the collective and the step, and leave what they did."""
    words = ("tokens_per_step=192", "steps=100000", f"parallel.timeout_minutes={SECONDS / 60}", f"run_root={tmp_path}")
    agent = start((*TORCHRUN, "3", ROOT / "train.py", *arguments, *words))
    wait_for_steps(tmp_path / "run", 5, agent)
    ranks = workers(agent)
    begin = time.monotonic()
    os.kill(ranks[hung], signal.SIGSTOP)
    _, err = agent.communicate(timeout=240)
    took = time.monotonic() - begin
    assert agent.returncode == 1 and all(map(ended, ranks))
    assert SECONDS - 2 < took < SECONDS + 60, "torch's own timeout is 1,800"
    told = errors(err)
    others = "ranks 1-2" if hung == 0 else "ranks 0-1"
    step = re.fullmatch(rf"error: step \d+: ({others}|rank \d) in the .*: waited 0.1 minutes .*", told[0])
    assert step and re.search(r"in the (all-|reduce-|agreement|gradient|sums)", told[0]), err
    assert f"rank {hung} did not arrive (process {ranks[hung]} on " in told[1], err
    assert sum("did not arrive" in line for line in told) == 1, err
    left = {file.name for file in (tmp_path / "run" / "hang").iterdir()}
    assert {f"rank-{rank}.txt" for rank in range(3) if rank != hung} <= left
    assert "most recent call first" in (tmp_path / "run" / "hang" / f"rank-{(hung + 1) % 3}.txt").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_hangs_on_gpus(arguments, tmp_path):
    """NCCL's collectives wait on the device: the recorder says which, and its file is there."""
    words = ("tokens_per_step=128", "steps=1000000", "parallel.timeout_minutes=0.5", f"run_root={tmp_path}")
    agent = start((*TORCHRUN, "2", ROOT / "train.py", *arguments, "device=cuda", *words))
    wait_for_steps(tmp_path / "run", 5, agent)
    ranks = workers(agent)
    begin = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    _, err = agent.communicate(timeout=500)
    assert agent.returncode == 1 and all(map(ended, ranks))
    assert time.monotonic() - begin < 30 + 90
    assert f"rank 1 did not arrive (process {ranks[1]} on " in err, err
    assert re.search(r"^error: step \d+: rank 0 in the .*: waited 0.\d+ minutes", err, re.MULTILINE), err
    assert (tmp_path / "run" / "hang" / "rank-0.txt").exists()
    recorded = pickle.loads((tmp_path / "run" / "hang" / "rank_0").read_bytes())["entries"]
    assert "nccl" in {entry["profiling_name"].split(":")[0] for entry in recorded}


def test_ranks_end_with_their_launcher(arguments, tmp_path):
    """torchrun is killed outright; a run that a shell started lives on after it."""
    agent = start(
        (
            *TORCHRUN,
            "2",
            ROOT / "train.py",
            *arguments,
            "tokens_per_step=128",
            "steps=100000",
            f"run_root={tmp_path / 'a'}",
        )
    )
    words = " ".join(map(str, (*arguments, "steps=100000", f"run_root={tmp_path / 'b'}")))
    shell = start(
        ("bash", "-c", f"nohup {TORCHRUN[0]} {ROOT / 'train.py'} {words} >/dev/null 2>&1 & echo $!; sleep 600")
    )
    alone = int(shell.stdout.readline())
    try:
        wait_for_steps(tmp_path / "a" / "run", 3, agent)
        wait_for_steps(tmp_path / "b" / "run", 3, shell)
        ranks = workers(agent)
        for each in (agent, shell):
            each.kill()
            each.wait()
        deadline = time.monotonic() + 60
        while not all(map(ended, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert agent.stderr.read().count("error: torchrun, process") == 1
        steps = (tmp_path / "b" / "run" / "metrics.jsonl").read_text().count("\n")
        while (tmp_path / "b" / "run" / "metrics.jsonl").read_text().count("\n") < steps + 5:
            assert not ended(alone)
            time.sleep(0.1)
    finally:
        os.kill(alone, signal.SIGKILL)
