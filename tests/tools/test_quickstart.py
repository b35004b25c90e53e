"""The demonstration's driver, with a stand-in for training: what it runs, when it stops, what it says."""

import importlib.util
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.tools.compare import plot

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.py"


@pytest.fixture
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def demo(quickstart, make_run, tmp_path, monkeypatch):
    """main() where training writes a run directory whose loss has the given gap; returns (status, commands)."""

    monkeypatch.setattr(plot, "save", lambda comparison, runs, target: target.touch())

    def run(*arguments, gaps=None, status=0, done=True, **facts):
        commands = []

        def call(command):
            commands.append(command)
            (recipe,) = (word.removeprefix("name=") for word in command if word.startswith("name="))
            if not status and not (tmp_path / "runs" / recipe).exists():
                make_run(recipe, 3 + np.exp(-np.arange(60) / 9) + (gaps or {}).get(recipe, 0.0), done=done, **facts)
            return status

        monkeypatch.setattr(quickstart, "call", call)
        monkeypatch.setattr(sys, "argv", ["quickstart.py", "--root", str(tmp_path / "runs"), *arguments])
        return quickstart.main(), commands

    return run


def test_trains_alike_and_compares(demo, tmp_path, capsys):
    """All runs but the last have one optimizer and one form of gradients, so their gaps are those of precision."""
    status, commands = demo("--steps", "60", "seed=7", "--environment", "/env", gaps={"fp4": 0.1, "mxfp4": -0.1})
    assert status == 0
    runs = ("bf16", "fp8", "mxfp4", "fp4-adamw", "fp4")
    assert [command[1:4] for command in commands] == [
        ["-m", "lowprec_train.main", f"+recipe={run.removesuffix('-adamw')}"] for run in runs
    ]
    for command, run in zip(commands, runs):
        alone = ["optim=adamw", "comm=bf16"] if run == "fp4-adamw" else []
        assert command[4:] == [*alone, f"name={run}", f"run_root={tmp_path / 'runs'}", "steps=60", "seed=7"]
    out = capsys.readouterr().out
    assert "| mxfp4 " in out and "Gate of ±0.15 nat: passed" in out and "unigram entropy: 6.0000" in out
    assert str(tmp_path / "runs" / "comparison" / "curves.png") in out and "source /env/bin/activate" in out


def test_precision_alone_is_precision_alone():
    """What the demo says of its runs, by their composed configurations."""
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        trees = {
            name: OmegaConf.to_container(compose("train", overrides=words))
            for name, words in {
                "bf16": ["+recipe=bf16"],
                "fp8": ["+recipe=fp8"],
                "mxfp4": ["+recipe=mxfp4"],
                "fp4-adamw": ["+recipe=fp4", "optim=adamw", "comm=bf16"],
                "fp4": ["+recipe=fp4"],
            }.items()
        }
    baseline = trees.pop("bf16")
    differing = {name: {key for key in baseline if tree[key] != baseline[key]} for name, tree in trees.items()}
    assert differing == {"fp8": {"precision"}, "mxfp4": {"precision"}, "fp4-adamw": {"precision"}} | {
        "fp4": {"precision", "optim", "comm"}
    }


def test_a_cpu_is_said_to_show_losses_alone(demo, capsys):
    demo(device="cpu")
    assert capsys.readouterr().out.count("A CPU computes low precision in FP32 or BF16: compare losses") == 1


def test_gap_beyond_the_gate_fails(demo):
    assert demo(gaps={"fp8": 0.16})[0] == 1


def test_a_loss_above_the_unigram_entropy_fails(demo, capsys):
    assert demo(valid_unigram_entropy=2.9)[0] == 1
    assert "does not use its context" in capsys.readouterr().err


def test_stops_at_the_first_failure(demo, capsys):
    status, commands = demo(status=3)
    assert (status, len(commands)) == (3, 1)
    assert "bf16 failed with status 3" in capsys.readouterr().err


def test_an_interrupted_run_stops_and_can_be_continued(demo, capsys, tmp_path):
    status, commands = demo(done=False)
    assert (status, len(commands)) == (130, 1)
    assert "the same command continues it" in capsys.readouterr().err
    (tmp_path / "runs" / "bf16" / "DONE").write_text('{"step": 60}')
    assert demo()[0] == 0


CHILD = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(20)
"""


def test_a_stop_request_reaches_the_run_which_saves(tmp_path):
    """SIGTERM to the driver alone: it passes it on and waits for the run's own end."""
    outer = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('quickstart', {str(SCRIPT)!r})\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        f"sys.exit(40 + module.call([sys.executable, '-c', {CHILD!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    try:
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "saved\n"
        assert process.wait() == 40 and time.monotonic() - started < 10
    finally:
        watchdog.cancel()
        process.stdout.close()


def test_threads_of_a_run_sleep_at_barriers(quickstart, tmp_path, monkeypatch):
    """Beside another busy process, spinning threads wait for each other; what the user has set stays."""
    told = tmp_path / "told"
    command = [sys.executable, "-c", f"import os; open({str(told)!r}, 'w').write(os.environ['OMP_WAIT_POLICY'])"]
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert quickstart.call(command) == 0 and told.read_text() == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert quickstart.call(command) == 0 and told.read_text() == "active"
