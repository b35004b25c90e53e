"""The heap of a run on the CPU, kept at what is in use.

glibc serves large tensors from its heap and keeps what is freed. A freed block of an aligned tensor does not fit the
next tensor of the same size (glibc bug 14581, mended in 2.38), so a run takes new memory in every step: llama_tiny
under fp8 grows from 0.6 to 3 GiB in 240 steps. `malloc_trim` gives the free pages back. A lower threshold for `mmap`
would keep tensors out of the heap, but their pages are then faulted in anew, twice the processor time.
"""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

import torch

GROWTH = 128 << 20  # bytes; giving back so much takes about 0.1 s


def release() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class HeapTrim:
    """Gives free memory of the heap back to the system: call it before each step. Does nothing for other devices.

    growth: bytes by which the process has to have grown since it last gave memory back.
    """

    def __init__(self, device: torch.device, growth: int = GROWTH) -> None:
        self._release = release() if device.type == "cpu" else None
        self._growth, self._least = growth, 0

    def __call__(self, step: int) -> None:
        if self._release is None or resident() < self._least + self._growth:
            return
        self._release(0)
        self._least = resident()
