"""Two processes through torchrun: the losses of one; a killed rank, a signal and another layout change nothing."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launches import ROOT, training
from tests.test_main_interruption import STEPS, TORCHRUN, arguments, losses, start, stop, wait_for_steps

__all__ = ["arguments"]
EXACT = ("comm=fp32", "max_grad_norm=0", "tokens_per_step=128")  # what is left is the same sums in the same order
INTERVAL = 7  # of telemetry
TIMES = ("time/", "perf/", "mem/")


@pytest.fixture(scope="module")
def train(arguments):
    return (ROOT / "train.py", *arguments, *EXACT)


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """The losses of one process with two micro-batches a step."""
    root = tmp_path_factory.mktemp("alone")
    process = training(root / "output", *train[1:], f"run_root={root}")
    assert process.wait(180) == 0, process.output.read_text()
    return losses(root / "run")


def workers(agent):
    """Process ids of torchrun's workers, by rank."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        values = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(value[5:]): child for value in values if value.startswith(b"RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


def test_a_killed_rank_and_a_restart(train, alone, tmp_path):
    """torchrun starts all ranks again, they find the last checkpoint, and the losses are those of one process without
    telemetry. Every row of telemetry is written once.
    """
    command = (*train, f"run_root={tmp_path}", f"telemetry_interval={INTERVAL}")
    agent = start((*TORCHRUN, "2", "--max-restarts=1", *command))
    wait_for_steps(tmp_path / "run", 25, agent)
    os.kill(workers(agent)[1], signal.SIGKILL)
    out, err = agent.communicate(timeout=240)
    assert agent.returncode == 0, err
    assert "resuming after step" in out and json.loads((tmp_path / "run" / "DONE").read_text())["step"] == STEPS
    assert losses(tmp_path / "run") == alone
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["processes"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"comm/grad_bytes", "time/slowest_rank", "time/step_ms_max"} <= set(last)
    rows = rows_once(tmp_path / "run")
    assert {row["step"] for row in rows} == set(range(INTERVAL, STEPS + 1, INTERVAL))


def test_rows_of_states_are_written_by_one_rank(train, tmp_path):
    process = start(
        (*TORCHRUN, "2", *train, f"run_root={tmp_path}", "optim=adamw_coat", "steps=4", "telemetry_interval=2")
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    rows = rows_once(tmp_path / "run")
    assert {row["step"] for row in rows} == {2, 4} and {"exp_avg", None} <= {row.get("state") for row in rows}


def rows_once(run):
    """The rows of telemetry, in the order of steps, none twice."""
    rows = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    places = [tuple(map(row.get, ("step", "site", "gemm", "operand", "parameter", "state"))) for row in rows]
    assert len(set(places)) == len(places) and [place[0] for place in places] == sorted(place[0] for place in places)
    return rows


def test_a_signal_and_another_layout(train, alone, tmp_path):
    """Saved by two processes at a signal that one of them got, finished by one."""
    run, command = tmp_path / "run", (*train, f"run_root={tmp_path}")
    step = stop(run, start((*TORCHRUN, "2", *command)), signal.SIGTERM, 12)
    process = start((*TORCHRUN, "1", *command))
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0 and f"resuming after step {step} of {STEPS}" in out, err
    assert losses(run) == alone


@pytest.mark.nightly
def test_every_logged_number_of_a_resumed_run_with_fp8_gradients(train, tmp_path):
    """Stopped between two measurements of what the reduction loses: all keys but times are those of a run left alone,
    the measured one too, which is repeated until the next measurement.
    """
    fp8 = (*train, "comm=fp8", "steps=40")
    process = start((*TORCHRUN, "2", *fp8, f"run_root={tmp_path / 'alone'}"))
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    run, command = tmp_path / "run", (*TORCHRUN, "2", *fp8, f"run_root={tmp_path}")
    step = stop(run, start(command), signal.SIGTERM, 19)
    process = start(command)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0 and f"resuming after step {step} of 40" in out and step % 16, err
    expected, found = numbers(tmp_path / "alone" / "run"), numbers(run)
    assert len({line["comm/grad_sqnr_db"] for line in expected}) == 3 and found == expected


def numbers(run):
    """All that a run logged but what it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_one_error_for_all(train, tmp_path):
    """A mistake is told once, and no run directory is left."""
    agent = start((*TORCHRUN, "2", *train, f"run_root={tmp_path / 'runs'}", "parallel.tp=3"))
    _, err = agent.communicate(timeout=120)
    assert agent.returncode == 1
    told, quoted = err.split("train.py FAILED")
    message = "error: parallel.dp_replicate=1, parallel.dp_shard=-1, parallel.tp=3: 1 * 3 does not divide 2 processes"
    assert told.count(message) == 1 and "Traceback" not in told.split("error: ")[0]
    assert quoted.splitlines()[-2] == f"  traceback : {message}", "torchrun ends with it, and with no trace of ours"
    assert not (tmp_path / "runs").exists()
