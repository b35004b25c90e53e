"""Timeline of a GPU: how much of a step is exposed communication, and how long the GPU is idle.

    exposed  = time of communication without any other kernel
    idle     = time from the first kernel to the last, minus the time of all kernels

Kernels of several streams overlap, so times are lengths of unions of intervals, not sums over kernels. `tracks` keeps
the intervals of one step, by class of kernel and by collective, for the picture of `timeline_plot.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowprec_train.train.diagnostics.kernel_times import is_kernel, kernel_class

Interval = tuple[float, float]
COMMUNICATION = "communication"
COLLECTIVES = {  # track -> pattern of NCCL's kernels
    "all-gather": r"allgather",
    "reduce-scatter": r"reducescatter",
    "all-reduce": r"allreduce",
    "all-to-all": r"sendrecv|alltoall",
}
GAP_US = 20.0  # tracks join intervals that are nearer than this


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


def tracks(found: Iterable[Kernel], steps: int) -> dict[str, str]:
    """Return when the kernels of the last of `steps` equal steps ran: by track "begin-end begin-end ...", microseconds
    from the step's first kernel. Intervals nearer than `GAP_US` are joined.
    """
    calls = sorted(found, key=lambda each: each.begin)
    calls = calls[len(calls) - len(calls) // steps :]
    by_track: dict[str, list[Interval]] = defaultdict(list)
    for each in calls:
        by_track[track(each.name)].append((each.begin - calls[0].begin, each.end - calls[0].begin))
    return {name: " ".join(f"{b:.0f}-{e:.0f}" for b, e in joined(each, GAP_US)) for name, each in by_track.items()}


def track(name: str) -> str:
    """Return a kernel's track: its class, or the collective that it belongs to."""
    kind = kernel_class(name)
    if kind != COMMUNICATION:
        return kind
    return next((each for each, pattern in COLLECTIVES.items() if re.search(pattern, name, re.IGNORECASE)), kind)


def joined(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """Return the union of intervals, without gaps shorter than `gap`."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin - found[-1][1] < gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intervals(text: str) -> list[Interval]:
    """Parse a track of `tracks`."""
    return [(float(begin), float(end)) for begin, end in (each.split("-") for each in text.split())]
