"""Progress of data preparation: a bar on a terminal, otherwise a line every ten seconds.

Bytes are of the stored input, of which the total is known before it is read; rates are of what this call has done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lowprec_train.data.tokenising import Counts

_LINE_SECONDS = 10.0
Clock = Callable[[], float]  # seconds


@contextmanager
def shown(
    size: int, console: Console | None = None, clock: Clock = time.monotonic
) -> Iterator[Callable[[Counts], None]]:
    """A function that shows counts as they come; `size`: stored bytes of the whole input."""
    console = console or Console(soft_wrap=True)
    pace, told = _Pace(clock), clock()

    def line(counts: Counts) -> None:
        nonlocal told
        numbers = pace.of(counts)
        if clock() >= told + _LINE_SECONDS:
            told = clock()
            console.print(f"{100 * counts.read / max(1, size):3.0f} %  {numbers}", highlight=False)

    if not console.is_terminal:
        yield line
        return
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task("tokenising", total=size, numbers="")
        yield lambda counts: bar.update(task, completed=counts.read, numbers=pace.of(counts))


class _Pace:
    """Rates since the first counts that it saw: an earlier call's work is not counted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: Counts | None = None

    def of(self, counts: Counts) -> str:
        """Documents and tokens so far, MB of text and tokens a second."""
        if self._first is None:
            self._first, self._began = counts, self._clock()
        seconds = max(self._clock() - self._began, 1e-3)
        megabytes = (counts.text_bytes - self._first.text_bytes) / 1e6 / seconds
        tokens = (counts.tokens - self._first.tokens) / 1e6 / seconds
        return f"{counts.documents:,} documents  {counts.tokens:,} tokens  {megabytes:.1f} MB/s  {tokens:.2f} Mtok/s"
