"""How far an evaluation is: tokens and their rate, on stderr where that is a terminal. The results go to stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def shown(label: str, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A function that takes the tokens predicted so far. The total is not known: text is read as it is needed."""
    console = console or Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label)

        def show(tokens: int) -> None:
            rate = tokens / max(bar.tasks[0].elapsed or 0.0, 1e-3)
            bar.update(task, description=f"{label}: {tokens:,} tokens, {rate:,.0f} a second")

        yield show
