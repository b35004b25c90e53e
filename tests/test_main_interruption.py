"""A run that is told to stop, or killed, ends with the losses of one that was left alone."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.launches import ROOT, environment, training, write_modules

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
STEPS = 100


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Overrides of a run that takes a few seconds, on a corpus of its own."""
    root = tmp_path_factory.mktemp("sources")
    write_modules(root)
    return (
        *("+recipe=mxfp4", "model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2"),
        *("model.vocab_size=320", "data.vocab_size=320", f"+data.root={root}", f"data.cache={root.parent / 'cache'}"),
        *("data.seq_len=32", "micro_batch=2", "tokens_per_step=64", "eval_batches=1", "checkpoint_interval=10"),
        *(f"steps={STEPS}", "name=run", f"run_root={root.parent / 'runs'}"),
    )


def start(command, **extra):
    return subprocess.Popen(
        [str(part) for part in command],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["train/loss"] for line in lines]


def wait_for_steps(run, count, process):
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    process = training(root / "output", *arguments, f"run_root={root}")
    assert process.wait(120) == 0, process.output.read_text()
    reference = losses(root / "run")
    assert len(reference) == STEPS and reference[-1] < reference[0] - 0.3
    return reference


def stop(run, process, number, after):
    """Signal a run when it has logged `after` steps; the step that it saved."""
    wait_for_steps(run, after, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, "torchrun's own status after a signal: the file is what counts"
    preempted = json.loads((run / "PREEMPTED").read_text())
    assert preempted["signal"] == number.name and after <= preempted["step"] < STEPS
    assert not (run / "DONE").exists() and "preempted at step" in out, err
    assert (run / "checkpoints" / "latest").read_text() == f"step-{preempted['step']}\n"
    return preempted["step"]


def test_signals_and_a_kill_leave_the_losses_alone(arguments, undisturbed, tmp_path):
    """SIGTERM through torchrun, SIGUSR1 through torchrun, SIGKILL; then the rest."""
    run = tmp_path / "run"
    train = (ROOT / "train.py", *arguments, f"run_root={tmp_path}")
    first = stop(run, start((*TORCHRUN, "1", *train)), signal.SIGTERM, 2)
    handed_on = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    second = stop(run, start((*TORCHRUN, "1", handed_on, *train)), signal.SIGUSR1, first + 2)

    process = training(tmp_path / "killed", *train[1:])
    wait_for_steps(run, second + 12, process)
    process.kill()
    process.wait(60)
    assert f"resuming after step {second} of {STEPS}" in process.output.read_text()
    assert not (run / "DONE").exists() and not (run / "PREEMPTED").exists()

    process = training(tmp_path / "rest", *train[1:])
    assert process.wait(120) == 0 and "resuming after step" in process.output.read_text(), process.output.read_text()
    assert json.loads((run / "DONE").read_text())["step"] == STEPS
    assert losses(run) == undisturbed
