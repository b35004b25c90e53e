"""The figures of a study: gap against tokens and final gap with its 95 % interval for each arm, a row for each cell;
loss against value of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_train.tools.compare import colours
from lowprec_train.tools.compare.plot import DASHES, MARKERS, QUIET, STYLE
from lowprec_train.tools.study.measure import Cell, Measured
from lowprec_train.tools.study.report import ends_text
from lowprec_train.tools.study.sweep import SweepRow


def save(measured: Measured, file: Path) -> None:
    """Draw a row of axes for each cell. The file name sets the format; equal studies give equal files."""
    cells = drawn_cells(measured)
    arms = dict.fromkeys(row.arm for cell in cells for row in cell.arms if row.arm != measured.baseline)
    places = {arm: place for place, arm in enumerate(arms)}
    heights = [3.4 + 0.16 * sum(row.arm in places for row in cell.arms) for cell in cells]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "study", "figure.constrained_layout.hspace": 0.06}):
        figure = Figure(figsize=(10.5, sum(heights)), layout="constrained")
        grid = figure.subplots(len(cells), 2, squeeze=False, width_ratios=(3, 2), height_ratios=heights)
        known: dict[str, Artist] = {}
        for (along, final), cell in zip(grid, cells, strict=True):
            draw_along(along, cell, places)
            draw_final(final, cell, measured.baseline, places)
            if len(measured.cells) > 1:
                along.set_title(f"{cell.name or 'Whole runs'}: {along.get_title('left')}")
            for handle, label in zip(*along.get_legend_handles_labels(), strict=True):
                known.setdefault(label, handle)
        if known:
            figure.legend(list(known.values()), list(known), loc="outside lower left", ncols=5)
        figure.suptitle(title(measured.baseline, cells), x=0.01, ha="left", fontsize=11)
        write(figure, file)


def drawn_cells(measured: Measured) -> list[Cell]:
    """Return the cells that compare arms: not those of the baseline alone, such as its other lengths."""
    compared = [cell for cell in measured.cells if any(row.arm != measured.baseline for row in cell.arms)]
    return compared or measured.cells[:1]


def title(baseline: str, cells: Sequence[Cell]) -> str:
    """Return the title over all rows, with the fewest and the most tokens of a run."""
    ends = (min(cell.tokens[0] for cell in cells), max(cell.tokens[1] for cell in cells))
    seeds = max((len(row.seeds) for cell in cells for row in cell.arms), default=0)
    millions = ends_text((ends[0] / 1e6, ends[1] / 1e6), ",.0f")
    return f"Loss gap to {baseline}, {millions} M tokens, up to {seeds} seeds"


def save_sweep(measured: Measured, file: Path) -> bool:
    """Draw mean losses against the value of the sweep; return False if the sweep is not over one number."""
    rows = measured.sweep
    if not rows or any(row.value is None or row.axis != rows[0].axis for row in rows):
        return False
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "study"}):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained")
        axes = figure.subplots()
        arms = list(dict.fromkeys(row.arm for row in rows))
        for place, arm in enumerate(arms):
            draw_sweep(axes, [row for row in rows if row.arm == arm], place)
        if all(row.value and row.value > 0 for row in rows):
            axes.set_xscale("log")
        seeds = max(len(row.seeds) for row in rows)
        axes.set(
            xlabel=rows[0].axis,
            ylabel="loss, nat",
            title=f"{seeds} seeds; filled: within 2 % of the best; cross: a seed is unstable",
        )
        axes.legend(ncols=2)
        write(figure, file)
    return True


def draw_sweep(axes: Axes, rows: list[SweepRow], place: int) -> None:
    """Draw an arm: a line through the means of stable values, a dot for each seed, crosses for unstable seeds."""
    rows = sorted(rows, key=lambda row: row.value or 0.0)
    colour, marker = colours.of_run(place)[0], MARKERS[place % len(MARKERS)]
    stable = [row for row in rows if row.loss is not None]
    look: dict[str, Any] = {"color": colour, "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.2}
    axes.plot([row.value or 0.0 for row in stable], [row.loss or 0.0 for row in stable], label=rows[0].arm, **look)
    for row in stable:
        face = colour if row.works else "none"
        axes.plot(row.value or 0.0, row.loss or 0.0, marker=marker, color=colour, markerfacecolor=face)
        each = list(row.losses.values())
        axes.plot([row.value or 0.0] * len(each), each, ".", color=colour, markersize=3, alpha=0.6)
    for row in (row for row in rows if row.loss is None):
        height = 0.98 - 0.035 * place
        axes.plot(row.value or 0.0, height, "x", color=colour, transform=axes.get_xaxis_transform())


def write(figure: Figure, file: Path) -> None:
    """Save in the format of the file name; an SVG has no date, so that equal figures are equal files."""
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=160)


def draw_along(axes: Axes, cell: Cell, places: Mapping[str, int]) -> None:
    """Draw the gap in percent against tokens; the band is the SD of the baseline's seeds. places: of the arms, which
    decide colours, dashes and markers.
    """
    axes.axhline(0, color=colours.BASELINE[0], linewidth=1.2)
    if cell.band is not None:
        axes.axhspan(-cell.band, cell.band, color=QUIET, alpha=0.12, linewidth=0, label="SD of the baseline's seeds")
    for row in cell.arms:
        if row.arm not in places or row.unstable:
            continue
        place = places[row.arm]
        x = [point.share * row.tokens / 1e6 for point in row.curve]
        look: dict[str, Any] = {"color": colours.of_run(place)[0], "linestyle": DASHES[place % len(DASHES)]}
        y = [point.percent for point in row.curve]
        axes.plot(x, y, marker=MARKERS[place % len(MARKERS)], markersize=3.5, linewidth=1.4, label=row.arm, **look)
    axes.set(xlabel="tokens, millions", ylabel="gap, % of the baseline's loss", title="along the run")


def draw_final(axes: Axes, cell: Cell, baseline: str, places: Mapping[str, int]) -> None:
    """Draw the final gaps in percent with their intervals, the first arm on top; unstable arms are labelled."""
    base = next((row.loss for row in cell.arms if row.arm == baseline), None)
    rows = [row for row in cell.arms if row.arm in places]
    axes.axvline(0, color=colours.BASELINE[0], linewidth=1.2)
    for y, row in enumerate(rows):
        place = places[row.arm]
        colour, marker = colours.of_run(place)[0], MARKERS[place % len(MARKERS)]
        if row.gap is None or row.percent is None or base is None:
            axes.annotate("  unstable" if row.unstable else "  no gap", (0, y), color=QUIET, va="center")
            continue
        half = 100 * row.gap.half / base if row.gap.half is not None else 0.0
        axes.errorbar(row.percent, y, xerr=half, color=colour, marker=marker, capsize=3, linewidth=1.4)
    axes.set_yticks(range(len(rows)), [f"{row.arm} (n={len(row.seeds)})" for row in rows])
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set(xlabel="gap, %", title="whole validation split, 95 % intervals")
