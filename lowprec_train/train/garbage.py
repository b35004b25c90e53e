"""Python's garbage collection at chosen steps, the same on all processes.

A full collection looks at every Python object, half a million of them after compilation, and takes 0.3 s (measured on
one CPU). Python starts one when enough objects were made, on each process in another step, and in each of these steps
all processes wait for one of them. So automatic collection is off during training. All processes collect the young
objects every `gc_interval` steps, as torchtitan (`gc_freq`) and Megatron-LM (`manual-gc-interval`) do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG = 1  # generations 0 and 1: objects that were made since the last collection


@contextmanager
def collected_every(interval: int) -> Iterator[Callable[[int], None]]:
    """Yield a callable that runs before each step and collects young objects before every `interval`-th, counted from
    the first. In between, automatic collection is off. interval 0: Python collects when it wants to.
    """
    if not interval or not gc.isenabled():
        yield lambda step: None
        return

    def begin_step(step: int) -> None:
        if step % interval == 0:
            gc.collect(YOUNG)

    gc.collect()
    gc.disable()
    try:
        yield begin_step
    finally:
        gc.enable()
