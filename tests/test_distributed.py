"""How tests over processes end: with what ranks return, or with one error that says which rank, and why."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from lowprec_train.parallel.mesh import Sizes
from tests.distributed import run_distributed, run_until_exit


def summed(rank: int, value: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor(value + rank)
    dist.all_reduce(total)
    return dist.get_world_size(), total


def failing(rank: int, which: int) -> None:
    print(f"rank {rank} says this first")
    if rank == which:
        raise KeyError(f"no such thing on {rank}")
    dist.barrier()


def ended(rank: int, which: int) -> int:
    if rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def late(rank: int) -> None:
    time.sleep(600)


def test_results_come_in_rank_order():
    assert run_distributed(summed, Sizes(dp_shard=2), 0.5) == [(2, torch.tensor(2.0))] * 2


def test_a_rank_that_fails_is_named_with_its_error_and_output():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n[^$]*KeyError: 'no such thing on 1'") as error:
        run_distributed(failing, 2, 1)
    assert "--- output of rank 1 ---\nrank 1 says this first" in str(error.value)


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(AssertionError, match="rank 1 ended with exit code -9"):
        run_distributed(ended, 2, 1, backend=None)
    assert run_until_exit(ended, 2, 0) == ([-signal.SIGKILL, 0], [None, 1])


def test_ranks_that_hang_are_named():
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] have not ended after 1 s"):
        run_distributed(late, 2, backend=None, timeout=1)
