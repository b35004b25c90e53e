"""The heap of a run on the CPU, kept at what is in use.

glibc serves large tensors from its heap and keeps what is freed. A freed block of an aligned tensor does not fit the
next tensor of the same size (glibc bug 14581, mended in 2.38), so a run takes new memory in every step: llama_tiny
under fp8 grows from 0.6 to 3 GiB in 240 steps. `malloc_trim` gives the free pages back. A lower threshold for `mmap`
would keep tensors out of the heap, but their pages are then faulted in anew, which doubles the time of a step.
"""

import ctypes
import time
from collections.abc import Callable

import torch


def release() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrim:
    """Gives free memory of the heap back to the system: call it before each step. Does nothing for other devices.

    seconds: least time between two releases, which take about 0.1 s each.
    """

    def __init__(self, device: torch.device, seconds: float = 5.0) -> None:
        self._release = release() if device.type == "cpu" else None
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self, step: int) -> None:
        if self._release is None or time.monotonic() - self._last < self._seconds:
            return
        self._release(0)
        self._last = time.monotonic()
