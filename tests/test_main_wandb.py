"""A run of 200 steps, stopped three times, with W&B offline: its files have every step once, as metrics.jsonl."""

import json
import signal
import time

import pytest

from lowprec_train.train.logging import wandb_files
from tests.launches import training, write_modules
from tests.test_kill import logged

STEPS = 200
STOPS = ((29, signal.SIGTERM), (75, signal.SIGTERM), (120, signal.SIGKILL))


@pytest.mark.nightly
def test_interruptions_leave_every_step_once(tmp_path):
    """Stopped as soon as steps 29 and 75 are logged, killed at 120, which takes what W&B had not written yet."""
    sources, run = tmp_path / "sources", tmp_path / "runs" / "r"
    write_modules(sources)
    command = (
        *("+recipe=fp4", "name=r", f"run_root={run.parent}", "logger=wandb", "logger.wandb.mode=offline"),
        *("model.layers=1", "model.vocab_size=320", "model.max_seq_len=64", "data.vocab_size=320", "data.seq_len=64"),
        *(f"+data.root={sources}", f"data.cache={tmp_path / 'cache'}", "micro_batch=1", "tokens_per_step=64"),
        *(f"steps={STEPS}", "checkpoint_interval=40", "eval_interval=200", "eval_batches=1"),
    )
    for number, (stop, how) in enumerate(STOPS):
        process = training(tmp_path / f"output-{number}", *command)
        while logged(run) < stop and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(how)
        assert process.wait(120) == (-how if how == signal.SIGKILL else 0), process.output.read_text()
        assert stop <= logged(run) < STEPS
    last = training(tmp_path / "output", *command)
    assert last.wait(300) == 0, last.output.read_text()
    files = wandb_files.files(run)
    assert len(files) >= len(STOPS) and len({wandb_files.run_id(file) for file in files}) == 1
    points = [point for file in files for point in wandb_files.history(file)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [point["_step"] for point in points] == [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [point["train/loss"] for point in points] == [line["train/loss"] for line in lines]
