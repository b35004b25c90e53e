"""Ranks of a tensor-parallel layer without processes: one thread each, which meet at a barrier and look at each other's
tensors. Autograd runs a CPU's backward pass in the thread that asks for it, so backward passes meet as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LIMIT = 120  # seconds: a rank that never comes is an error, not a hang


class Meeting:
    """Where `count` threads hand each other a tensor."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LIMIT)
        self.table: list[Any] = [None] * count

    def exchange(self, index: int, x: Tensor) -> list[Tensor]:
        """Everybody's x, in rank order."""
        self.table[index] = x.detach()
        self.barrier.wait()
        seen = list(self.table)
        self.barrier.wait()
        return seen


@dataclass(frozen=True)
class ThreadRanks:
    """A `precision.split.Ranks` of threads; sums are FP32, in rank order, rounded once."""

    count: int
    index: int
    meeting: Meeting

    def largest(self, x: Tensor) -> Tensor:
        mine = x.detach().float()
        mine = mine.masked_fill(mine.isnan(), torch.inf)
        return torch.stack(self.meeting.exchange(self.index, mine)).amax(0)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.meeting.exchange(self.index, x), dim)

    def gather_rows(self, x: Tensor) -> Tensor:
        return _GatherRows.apply(x, self)

    def scatter_sum_rows(self, x: Tensor) -> Tensor:
        return _ScatterSumRows.apply(x, self)

    def gathered(self, x: Tensor) -> Tensor:
        return self.gather(x, 0)

    def summed(self, x: Tensor) -> Tensor:
        parts = [each.chunk(self.count)[self.index].float() for each in self.meeting.exchange(self.index, x)]
        return torch.stack(parts).sum(0).to(x.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return ranks.gathered(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.ranks.summed(dy), None


class _ScatterSumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return ranks.summed(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.ranks.gathered(dy), None


@dataclass(frozen=True)
class Mirror:
    """One rank among `count` that hold what it holds: the same graph as among real ones, and nobody to wait for."""

    count: int
    index: int

    def largest(self, x: Tensor) -> Tensor:
        mine = x.detach().float()
        return mine.masked_fill(mine.isnan(), torch.inf)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.count, dim)

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.count)

    def scatter_sum_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.count, -1)).sum(0)


def among(count: int, body: Callable[[ThreadRanks], T]) -> list[T]:
    """What `body` returns on each of `count` ranks; the first failure is raised."""
    meeting, results, failures = Meeting(count), [None] * count, []

    def run(index: int) -> None:
        try:
            results[index] = body(ThreadRanks(count, index, meeting))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [each for each in failures if not isinstance(each, threading.BrokenBarrierError)] or failures
    if causes:
        raise causes[0]
    return results
