"""Loggers and the profiler from the command line: a run that crashes and goes on, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lowprec_train.train.diagnostics.snapshots import Snapshots
from lowprec_train.train.logging import wandb_files
from lowprec_train.train.trainer import Trainer
from tests.launches import Command, write_modules
from tests.launching import launcher

SMALL = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=320"),
    *("data.vocab_size=320", "data.seq_len=64", "micro_batch=2", "tokens_per_step=256", "steps=12", "eval_batches=1"),
    *("data.cache=cache", "checkpoint_interval=6", "checkpoint_async=false", "eval_interval=6", "+recipe=fp4"),
)


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    return launcher(SMALL, tmp_path, monkeypatch, capfd)


def crash_in(step, monkeypatch):
    """The next launch fails in this step, which then mends itself."""
    take = Trainer.step

    def step_or_crash(self):
        if self.steps_done + 1 == step:
            monkeypatch.setattr(Trainer, "step", take)
            raise OSError("the machine is on fire")
        return take(self)

    monkeypatch.setattr(Trainer, "step", step_or_crash)


def ask_in(step, monkeypatch):
    """Someone touches SNAPSHOT in this step."""
    take = Trainer.step

    def step_and_ask(self):
        if self.steps_done + 1 == step:
            Path("runs/run/SNAPSHOT").touch()
        return take(self)

    monkeypatch.setattr(Trainer, "step", step_and_ask)
    monkeypatch.setitem(Snapshots.__init__.__kwdefaults__, "patience", 0)


def test_loggers_show_a_crashed_run_as_one(launch, monkeypatch):
    """It fails in step 10, is saved at 6, and takes 7 to 9 again: all loggers have the numbers of metrics.jsonl once.
    The second launch is profiled and asked for a snapshot."""
    loggers = ("name=run", "logger=wandb", "logger.wandb.mode=offline")
    tensorboard = "+logger.tensorboard._target_=lowprec_train.train.logging.tensorboard_sink.TensorBoardSink"
    crash_in(10, monkeypatch)
    status, _, err = launch(*loggers, tensorboard)
    assert status == 1 and "error: the machine is on fire" in err
    wandb.teardown()
    ask_in(9, monkeypatch)
    status, out, err = launch(*loggers, tensorboard, "profile.first=8", "profile.steps=2")
    wandb.teardown()
    assert status == 0, err
    assert "resuming after step 6 of 12" in out and "profile: runs/run/profile/steps-8-9.rank-0.json.gz" in out
    assert out.count("runs/run/SNAPSHOT: snapshots are of GPU memory, and this run is on cpu") == 1

    run = Path("runs/run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines]
    first, second = wandb_files.files(run)
    assert wandb_files.run_id(first) == wandb_files.run_id(second)
    points = wandb_files.history(first) + wandb_files.history(second)
    assert [p["_step"] for p in points] == [line["step"] for line in lines] == list(range(1, 13))
    assert [p["train/loss"] for p in points] == losses and [p["data/tokens"] for p in points][-1] == 12 * 256
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (line["step"], pytest.approx(line["train/loss"], rel=1e-6)) for line in lines
    ]
    with gzip.open(run / "profile" / "steps-8-9.rank-0.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert any(name.startswith("lowprec::") for name in names)
    assert "lowprec::" in (run / "profile" / "steps-8-9.rank-0.txt").read_text()
    assert (run / "wandb" / "latest-run" / "files" / "recipe.json").read_text() == (run / "recipe.json").read_text()


def test_out_of_memory_is_one_line(launch, monkeypatch):
    monkeypatch.setattr(Trainer, "step", lambda self: torch.empty(2**50))
    status, _, err = launch("name=greedy")
    assert status == 1 and err.count("\n") == 1
    assert err.startswith("error: out of memory on the CPU in step 1: 4503599627370496 bytes requested. Try a smaller")


def test_a_run_whose_output_cannot_be_written_trains_to_its_end(tmp_path):
    """Its log is on a full disk: one warning, no trace, and nothing is lost."""
    write_modules(tmp_path / "text")
    command = Command(
        *("train", *SMALL, f"+data.root={tmp_path / 'text'}", "steps=3", "name=run", "logger.console.every=1"),
        output=Path("/dev/full"),
        errors=tmp_path / "errors",
        directory=tmp_path,
    )
    assert command.wait(120) == 0
    (warning,) = (tmp_path / "errors").read_text().splitlines()
    assert warning.startswith("warning: the console cannot be written (No space left on device)")
    assert len((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()) == 3
