"""Apply a function to a stream of items in worker processes; results keep the order of the items.

Processes are spawned: they inherit nothing, and end when this process does, even when it is killed outright. A bounded
number of items is in flight, so an endless stream takes bounded memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`function` of each item, in order, by `workers` processes; 0: by this one. It is a function of a module.

    Raises:
        OSError: a process died. Whatever `function` raises is raised here, at its place in the order.
    """
    if not workers:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died, of a signal or for lack of memory; the same command goes on") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """A terminal's interrupt is for the first process alone; a worker does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
