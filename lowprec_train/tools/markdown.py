"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; the first column is aligned left, the others right."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'--:|' * (len(header) - 1)}"]
    return [*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)]


def number(value: float | None, digits: int = 2) -> str:
    """A number with separated thousands; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"
