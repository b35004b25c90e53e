"""A run of two ranks with all that saves memory, saved, and gone on with by one process that has none of it; and one
of two ranks that skips a parameter, is killed, and goes on.
"""

import os
import signal

import pytest
import torch

from lowprec_train.config import RunConfig
from lowprec_train.optim import in_backward
from lowprec_train.optim.shard import local
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.launch import ALONE, World
from lowprec_train.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parallel.runs import LEAN, MICRO, SEQ, SPLIT, TINY, built
from tests.recipes import composed
from tests.train.standins import bits, same

COAT = ("+recipe=coat", *SPLIT, *TINY, "comm=fp32", "max_grad_norm=0", "optim/master=bf16", "steps=4")
COAT += (f"tokens_per_step={2 * MICRO * SEQ}",)


def saving(directory: str) -> Checkpointer:
    return Checkpointer(directory, interval=2, keep=1, asynchronous=False)


def steps(trainer: Trainer, count: int) -> list[float]:
    return [float(trainer.step()["train/loss"]) for _ in range(count)]


def work(rank: int, run: RunConfig, directory: str) -> list[float]:
    """Two steps, one that fetches states ahead, and a save."""
    trainer = built(run, World(rank, 2, rank), torch.bfloat16)
    losses = steps(trainer, 2)
    saving(directory).save(trainer.checkpoint_parts(), 2, wait=True)
    return losses


def test_another_layout_without_offload_goes_on_bit_for_bit(tmp_path):
    lean, plain = composed(*COAT, *LEAN, "parallel.dp_shard=2"), composed(*COAT)
    alone = built(plain, ALONE, torch.bfloat16)
    expected = steps(alone, 4)
    ranks = run_distributed(work, 2, lean, str(tmp_path))
    assert ranks == [expected[:2]] * 2
    for run in (plain, composed(*COAT, *LEAN)):
        trainer = built(run, ALONE, torch.bfloat16)
        assert saving(str(tmp_path)).load(trainer.checkpoint_parts(), optional=()) == 2
        assert steps(trainer, 2) == expected[2:]
        assert same(bits(trainer), bits(alone))


class Poison:
    """In the place of `in_backward.local`: makes the first gradient of a backward pass not finite, where armed."""

    armed = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        part = local(gradient)
        if self.armed:
            part.view(-1)[0] = float("nan")
        self.armed = False
        return part


def skipping(rank: int, run: RunConfig, directory: str, how: str) -> tuple[list[float], dict, set[float]]:
    """Losses from where a run begins, this rank's part of all that it holds after four steps, and its counts of steps.

    In the second step one number of rank 1's part of one gradient is not finite. how: "saved" after it and killed a
    step later, "resumed" from there, or "alone".
    """
    poison = in_backward.local = Poison()
    trainer = built(run, World(rank, 2, rank), torch.bfloat16)
    saver, losses = saving(directory), []
    begin = saver.load(trainer.checkpoint_parts(), optional=()) if how == "resumed" else 0
    for step in range(begin, 4):
        poison.armed = rank == 1 and step == 1
        losses += steps(trainer, 1)
        if how == "saved" and step == 1:
            saver.save(trainer.checkpoint_parts(), 2, wait=True)
        if how == "saved" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    held = {name: local(each) if isinstance(each, torch.Tensor) else each for name, each in bits(trainer).items()}
    return losses, held, {float(state["step"]) for state in trainer.optimizer.state.values()}


def test_a_run_that_skipped_a_parameter_is_killed_and_goes_on_bit_for_bit(tmp_path):
    """Updates inside of the backward pass, over shards: one parameter has a step less than the others."""
    run = composed(*COAT, "optim.in_backward=true", "parallel.dp_shard=2")
    alone = run_distributed(skipping, 2, run, str(tmp_path / "none"), "alone")
    with pytest.raises(AssertionError, match="exit code -9"):
        run_distributed(skipping, 2, run, str(tmp_path), "saved")
    resumed = run_distributed(skipping, 2, run, str(tmp_path), "resumed")
    for (losses, held, counts), (rest, again, counted) in zip(alone, resumed, strict=True):
        assert counts == counted == {3.0, 4.0} and rest == losses[2:]
        assert same(held, again)
