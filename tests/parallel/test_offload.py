"""A run of two ranks with all that saves memory, saved, and gone on with by one process that has none of it."""

import torch

from lowprec_train.config import RunConfig
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
