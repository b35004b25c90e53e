"""Groups without processes: threads, one a rank, which meet at a barrier and look at each other's tensors. Autograd
runs a CPU's backward pass in the thread that asks for it, so backward passes meet as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowprec_train.group import Group, nan_as_infinity, sum_in_order

T = TypeVar("T")
LIMIT = 120  # seconds: a rank that never comes is an error, not a hang


class Meeting:
    """Where `size` threads hand each other a tensor."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT)
        self.table: list[Any] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Everybody's x, in rank order."""
        self.table[rank] = x.detach().clone()
        self.barrier.wait()
        seen = list(self.table)
        self.barrier.wait()
        return seen


@dataclass(frozen=True)
class ThreadGroup:
    """A `Group` of threads."""

    size: int
    rank: int
    meeting: Meeting

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, nan_as_infinity(x))).amax(0)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return sum_in_order(self.meeting.exchange(self.rank, x))

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return sum_in_order([each.chunk(self.size)[self.rank] for each in self.meeting.exchange(self.rank, x)])


@dataclass(frozen=True)
class Recorded:
    """A group that notes what is sent: (method, dtype, elements)."""

    group: Group
    sent: list[tuple[str, torch.dtype, int]] = field(default_factory=list, compare=False)

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def calls(self) -> list[str]:
        return [name for name, _, _ in self.sent]

    def __getattr__(self, name: str) -> Any:
        def noted(x: Tensor, *rest: Any, **named: Any) -> Tensor:
            self.sent.append((name, x.dtype, x.numel()))
            return getattr(self.group, name)(x, *rest, **named)

        return noted


def thread_groups(size: int) -> list[ThreadGroup]:
    """What each rank of one group has of it."""
    meeting = Meeting(size)
    return [ThreadGroup(size, rank, meeting) for rank in range(size)]


def among(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """What `body` returns on each of `size` ranks; the first failure is raised."""
    groups, results, failures = thread_groups(size), [None] * size, []

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank] = body(group)
        except BaseException as error:
            failures.append(error)
            group.meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [each for each in failures if not isinstance(each, threading.BrokenBarrierError)] or failures
    if causes:
        raise causes[0]
    return results
