"""How far an evaluation is: tokens and their rate, on stderr where that is a terminal. The results go to stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def shown(label: str, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A function that takes the tokens predicted since its last call. Text is read as needed: the total is unknown."""
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def show(tokens: int) -> None:
            bar.advance(task, tokens)
            done, seconds = int(bar.tasks[0].completed), max(bar.tasks[0].elapsed or 0.0, 1e-3)
            bar.update(task, description=f"{label}: {done:,} tokens, {done / seconds:,.0f} a second")

        yield show
