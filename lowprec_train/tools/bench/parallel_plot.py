"""The figure of `lowprec bench parallel`: tokens per second of every arm, and the parts of its step.

There is one line per row of the table. Right panel: the median step. A profile gives the time of communication without
other kernels (exposed) and the time without any kernel (idle); the rest is kernels. Rows without a profile have one
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lowprec_train.tools.compare import colours
from lowprec_train.tools.compare.plot import INK, QUIET, STYLE

PARTS = {
    "kernels": colours.of_run(0)[0],
    "exposed communication": colours.of_run(1)[0],
    "idle": "#9aa0a6",
    "not profiled": "#c8d7e6",
}


def save(result: Mapping[str, Any], file: Path) -> bool:
    """Draw the rows that were measured. Returns False if there are none."""
    rows = [row for row in result["rows"] if "ms" in row]
    if not rows:
        return False
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x", "svg.hashsalt": "parallel"}):
        figure = Figure(figsize=(10.5, 1.4 + 0.34 * len(rows)), layout="constrained")
        rates, steps = figure.subplots(1, 2, sharey=True)
        draw_rates(rates, rows)
        draw_steps(steps, rows)
        rates.set_yticks(range(len(rows)), labels(rows))
        rates.invert_yaxis()
        figure.legend(*steps.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS))
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=160)
    return True


def parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a step by part; their sum is the step. Parts of the profile are limited to the time of
    the step, since recording slows the host.
    """
    if row.get("exposed_ms") is None or row.get("idle_ms") is None:
        return {"not profiled": row["ms"]}
    exposed = min(row["exposed_ms"], row["ms"])
    idle = min(row["idle_ms"], row["ms"] - exposed)
    return {"kernels": row["ms"] - exposed - idle, "exposed communication": exposed, "idle": idle}


def labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the rows, with the group if a name is not unique."""
    names = [row["name"] for row in rows]
    return [f"{row['name']} ({row['group']})" if names.count(row["name"]) > 1 else row["name"] for row in rows]


def draw_rates(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw tokens per second and GPU, and the ratio to the BF16 baseline of the same group."""
    palette = [QUIET if row["baseline"] else colours.of_run(0)[0] for row in rows]
    bars = axes.barh(range(len(rows)), [row["tokens_per_s"] for row in rows], color=palette, height=0.7)
    axes.bar_label(bars, [f" {row['of_group']:.2f}" if row.get("of_group") else "" for row in rows], color=INK)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens/s/GPU (number: times BF16 of its group)")
    axes.margins(x=0.12)


def draw_steps(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the parts of the steps as stacked bars."""
    found, left = [parts(row) for row in rows], [0.0] * len(rows)
    for name, colour in PARTS.items():
        if any(name in each for each in found):
            width = [each.get(name, 0.0) for each in found]
            axes.barh(range(len(rows)), width, left=left, color=colour, height=0.7, label=name)
            left = [start + more for start, more in zip(left, width, strict=True)]
    axes.set_xlabel("ms a step")
