"""Progress of long commands: a progress bar on a terminal; otherwise, for data preparation, a line every 10 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lowprec_train.data.tokenising import Counts

_LINE_SECONDS = 10.0


@contextmanager
def of_preparation(
    size: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Counts], None]]:
    """Yield a function that shows counts. size: stored bytes of the whole input. clock: returns seconds.

    Rates are computed since the first counts, without the work of an earlier call.
    """
    console = console or Console(soft_wrap=True)
    first: Counts | None = None
    began = printed = clock()
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
    on_terminal = console.is_terminal
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=not on_terminal) as bar:
        task = bar.add_task("tokenising", total=size, numbers="")

        def show(counts: Counts) -> None:
            nonlocal first, began, printed
            if first is None:
                first, began = counts, clock()
            numbers = _numbers(counts, first, max(clock() - began, 1e-3))
            bar.update(task, completed=counts.read, numbers=numbers)
            if not on_terminal and clock() >= printed + _LINE_SECONDS:
                printed = clock()
                console.print(f"{100 * counts.read / max(1, size):3.0f} %  {numbers}", highlight=False)

        yield show


def _numbers(counts: Counts, first: Counts, seconds: float) -> str:
    """Return text with the documents and tokens so far, and MB of text and tokens per second."""
    megabytes = (counts.text_bytes - first.text_bytes) / 1e6 / seconds
    tokens = (counts.tokens - first.tokens) / 1e6 / seconds
    return f"{counts.documents:,} documents  {counts.tokens:,} tokens  {megabytes:.1f} MB/s  {tokens:.2f} Mtok/s"


@contextmanager
def of_evaluation(label: str, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows progress on stderr (results go to stdout). Its argument is the number of tokens
    predicted since the last call. Text is read as needed, so the total is unknown.
    """
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def show(tokens: int) -> None:
            bar.advance(task, tokens)
            done, seconds = int(bar.tasks[0].completed), max(bar.tasks[0].elapsed or 0.0, 1e-3)
            bar.update(task, description=f"{label}: {done:,} tokens, {done / seconds:,.0f} a second")

        yield show
