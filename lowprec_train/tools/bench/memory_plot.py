"""The figure of `lowprec bench memory`: memory of a step at each mark, by category, with one panel per contestant."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lowprec_train.tools.bench.fields import CATEGORIES
from lowprec_train.tools.compare import colours
from lowprec_train.tools.compare.plot import QUIET, STYLE

GIB = 2**30
COLUMNS, TITLE = 3, 48  # panels in a row, characters in a line of a title


def save(result: Mapping[str, Any], file: Path) -> bool:
    """Draw the rows that were measured. Returns False if there are none."""
    rows = [row for row in result["rows"] if row.get("marks")]
    if not rows:
        return False
    lines = -(-len(rows) // COLUMNS)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "memory"}):
        figure = Figure(figsize=(10.5, 0.6 + 2.9 * lines), layout="constrained")
        panels = figure.subplots(lines, min(COLUMNS, len(rows)), sharey=True, squeeze=False)
        for axes in panels.flat[len(rows) :]:
            axes.set_visible(False)
        for axes, row in zip(panels.flat, rows, strict=False):
            draw(axes, row["marks"])
            axes.set_title(
                textwrap.fill(row["name"], TITLE, break_long_words=False, break_on_hyphens=False), fontsize=8
            )
        for line in panels:
            line[0].set_ylabel("GiB")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=len(CATEGORIES))
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=160)
    return True


def draw(axes: Any, marks: Sequence[Mapping[str, Any]]) -> None:
    """Draw stacked categories, and a line at the loss: forward is before it, backward and update are after it."""
    x = range(len(marks))
    series = [[mark[name] / GIB for mark in marks] for name in CATEGORIES]
    palette = [colours.of_run(place)[0] for place in range(len(CATEGORIES))]
    axes.stackplot(x, series, labels=CATEGORIES, colors=palette, step="post", linewidth=0)
    at = next((place for place, mark in enumerate(marks) if mark["mark"] == "loss"), None)
    if at is None:
        raise ValueError("marks of a row do not have the loss, where the figure has its line")
    axes.axvline(at, color=QUIET, linewidth=0.8, linestyle=":")
    axes.set_xticks([at, len(marks) - 1], ["loss", "update"])
    axes.margins(x=0)
