"""Measure the time of device work: by events on the GPU, by the host's clock elsewhere.

Two effects distort the time of a kernel of some microseconds: inputs that the previous call left in the L2 cache, and a
GPU that waits for the host to launch. Both are avoided: each timed call follows a read of a buffer larger than the L2
(a write would leave lines that the timed kernel must evict), and successive calls use different inputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 1 << 30  # its read takes about 0.25 ms on an H200: longer than the host needs for the next launch
L2_WITHOUT_GPU = 1 << 16


class Interval:
    """Measures a block: `with Interval(device) as one: ...`, then `one.ms`, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __enter__(self) -> Interval:
        self._begin = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._now()

    @property
    def ms(self) -> float:
        """Milliseconds between entering and leaving."""
        if not self._cuda:
            return (self._end - self._begin) * 1e3
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Clock:
    """Measures the median time of calls. budget_ms: device time of one measurement, with `fewest` to `most` calls."""

    def __init__(self, device: torch.device, *, budget_ms: float = 40.0, fewest: int = 5, most: int = 40) -> None:
        self.device, self.budget_ms, self.fewest, self.most = device, budget_ms, fewest, most
        size = FLUSH_BYTES if device.type == "cuda" else 8
        self._flush_buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def median_ms(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the median milliseconds of a call. calls: the same work on different buffers, called in turn."""
        for call in (*calls, calls[0]):
            call()  # compile and allocate
        with Interval(self.device) as first:
            calls[-1]()
        turns = min(self.most, max(self.fewest, round(self.budget_ms / max(first.ms, 1e-3))))
        intervals = []
        for turn in range(turns):
            self._flush_l2()
            with Interval(self.device) as interval:
                calls[turn % len(calls)]()
            intervals.append(interval)
        return statistics.median(each.ms for each in intervals)

    def _flush_l2(self) -> Tensor:
        return self._flush_buffer.amax()


def copies(bytes_of_one: int, device: torch.device) -> int:
    """Return the number of different inputs: 2 to 16, together at least twice the L2 cache if possible."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else L2_WITHOUT_GPU
    return min(16, max(2, -(-2 * l2 // max(1, bytes_of_one))))
