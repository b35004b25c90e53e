"""Timeline of a GPU: how much of a step is exposed communication, and how long the GPU is idle.

    exposed  = time of communication without any other kernel
    idle     = time from the first kernel to the last, minus the time of all kernels

Kernels of several streams overlap, so times are lengths of unions of intervals, not sums over kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowprec_train.train.diagnostics.kernel_times import is_kernel, kernel_class

Interval = tuple[float, float]
COMMUNICATION = "communication"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One call of a kernel. begin, end: microseconds."""

    name: str
    begin: float
    end: float


def kernels(events: Iterable[Any]) -> list[Kernel]:
    """Return the GPU kernels among the events of a `torch.profiler.profile`."""
    return [
        Kernel(name=event.name, begin=event.time_range.start, end=event.time_range.end)
        for event in events
        if is_kernel(event, on_gpu=True)
    ]


def exposure(found: Iterable[Kernel], steps: int) -> dict[str, float]:
    """Return milliseconds per step: `duration_ms`, `exposed_ms` and `idle_ms`; {} without kernels."""
    calls = list(found)
    if not calls:
        return {}
    sent = [(each.begin, each.end) for each in calls if kernel_class(each.name) == COMMUNICATION]
    computed = [(each.begin, each.end) for each in calls if kernel_class(each.name) != COMMUNICATION]
    busy, alone = length([*sent, *computed]), length(computed)
    duration = max(each.end for each in calls) - min(each.begin for each in calls)
    found_us = {"duration_ms": duration, "exposed_ms": busy - alone, "idle_ms": duration - busy}
    return {name: us / steps / 1e3 for name, us in found_us.items()}


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
