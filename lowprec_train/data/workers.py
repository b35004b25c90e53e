"""Apply a function to a stream of items in worker processes; results keep the order of the items.

Processes are spawned: they inherit nothing, and end when this process ends, also by SIGKILL. A bounded number of items
is in flight, so an endless stream needs bounded memory.
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
    """Yield `function` of each item, in order, from `workers` processes; 0: from this one.

    Raises:
        OSError: a process died. Exceptions of `function` are raised here, at their place in the order.
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
        raise OSError("a worker process died, by a signal or for lack of memory; the same command continues") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Ignore a terminal's interrupt, which the first process handles, and end when that process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
