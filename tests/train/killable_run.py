"""A run for a process of its own, to be killed or starved of disk: resumed if its directory holds a checkpoint, with
two skipped steps."""

import resource
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.logging.sinks import JsonlSink, RunFacts
from tests.launches import redirect
from tests.train.standins import make_trainer

torch.compiler.reset()  # loads now, before the fork, what torch would load at the first step


@contextmanager
def file_size(limit):
    """No file may grow past `limit` bytes: writing fails with EFBIG, as it does with ENOSPC on a full disk. 0: no
    limit."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Troubled(Checkpointer):
    """Dawdles at every stage of a save, so that a kill can land in each; from step `limit_from` on its files are
    limited."""

    pause, limit, limit_from = 0.0, 0, 0

    def _write(self, flat, step):
        time.sleep(self.pause)
        with file_size(self.limit if step >= self.limit_from else 0):
            super()._write(flat, step)

    def _publish(self, partial, step):
        time.sleep(self.pause)
        super()._publish(partial, step)

    def _prune(self, newest):
        time.sleep(self.pause)
        super()._prune(newest)


def run(directory, *, keep=2, pause=0.0, step_pause=0.0, limit=0, limit_from=0, asynchronous=True):
    trainer = make_trainer(steps=30, poison=[4, 11], max_nonfinite_steps=5)
    checkpointer = Troubled(directory / "checkpoints", interval=3, keep=keep, asynchronous=asynchronous)
    checkpointer.pause, checkpointer.limit, checkpointer.limit_from = pause, limit, limit_from
    resumed = checkpointer.load(trainer.checkpoint_parts()) or 0
    print("resumed", resumed, flush=True)
    sink = JsonlSink(run=RunFacts(name="r", directory=directory, steps=30, resumed_step=resumed))

    def after_step():
        time.sleep(step_pause)
        return False

    print(trainer.fit(sinks=[sink], checkpointer=checkpointer, should_stop=after_step), flush=True)


def launch(directory, output, options):
    """Entry of the process: its output goes to a file."""
    redirect(Path(output))
    run(Path(directory), **options)
