"""Format tables: in Markdown, and in aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is aligned left, the others right."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'--:|' * (len(header) - 1)}"]
    return [*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)]


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with thousands separators; "" for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def aligned(rows: Sequence[Sequence[str]], least: int = 0) -> list[list[str]]:
    """Pad cells to the widths of their columns: the first column is aligned left, the others right.

    least: minimum width of a column, in characters.
    """
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows]
