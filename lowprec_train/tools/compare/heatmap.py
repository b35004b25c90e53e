"""Heat maps of telemetry: one panel per operand and optimizer state, one cell per layer and logged step.

Cells without a number are blank. The operands share one colour scale, and each state has its own: with an FP16 moment,
50 dB above 4-bit operands, in the same scale, these would have one colour. Runs of a comparison share their scales. If
one end of a statistic is better, it is the light end: high SQNR, few underflows.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_train.tools.compare.curves import evenly
from lowprec_train.tools.compare.plot import QUIET, png, shortened
from lowprec_train.tools.compare.runs import Run
from lowprec_train.tools.compare.telemetry import FILE, LABELS, Map, maps, read_rows

LIGHT_IS_HIGH = ("sqnr_db",)
Limits = Mapping[str, tuple[float, float]]
"""Group -> (low, high) of its colour scale."""

OPERANDS = "operands"
BLANK = "#e8eaed"
TICKS = 24  # maximum number of layer names on an axis


def save(runs: Sequence[Run], figure: str, target: Path) -> tuple[list[Path], list[str]]:
    """Draw every run's maps into `<target>/heatmap-<label>.png`, 1760 pixels wide.

    Returns the files, and at most two sentences about runs without data.
    """
    found = {run.label: maps(read_rows(run.path / FILE), figure) for run in runs}
    limits = scales(each for of_run in found.values() for each in of_run)
    files = []
    for run in (run for run in runs if found[run.label]):
        files.append(target / f"heatmap-{re.sub(r'[^A-Za-z0-9_.=+-]+', '_', run.label)}.png")
        paint(found[run.label], figure, limits, title=f"{run.label}: {LABELS[figure]}", target=files[-1])
    return files, missing([run for run in runs if not found[run.label]], figure)


def missing(runs: Sequence[Run], figure: str) -> list[str]:
    """Return sentences that say why these runs have no heat map."""
    watched = [run.label for run in runs if (run.path / FILE).exists()]
    others = [run.label for run in runs if run.label not in watched]
    reasons = {f"telemetry has no {figure}": watched, "run without telemetry (telemetry_interval=N)": others}
    return [f"No heat map of {', '.join(labels)}: {reason}" for reason, labels in reasons.items() if labels]


def group(each: Map) -> str:
    """Return the group of a map. Maps of one group share a colour scale."""
    return OPERANDS if "." in each.name else each.name


def scales(all_maps: Iterable[Map]) -> Limits:
    """Return the colour limits of every group."""
    members: dict[str, list[Map]] = {}
    for each in all_maps:
        members.setdefault(group(each), []).append(each)
    return {name: scale(of_group) for name, of_group in members.items()}


def scale(all_maps: Iterable[Map]) -> tuple[float, float]:
    """Return the smallest and largest finite value, widened to a range if they are equal or absent."""
    values = np.concatenate([np.empty(0), *(each.values.ravel() for each in all_maps)])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def paint(found: Sequence[Map], figure: str, limits: Limits, *, title: str, target: Path) -> None:
    """Draw one run's maps into a PNG file: two per row, operands before states."""
    kinds = ([m for m in found if group(m) == OPERANDS], [m for m in found if group(m) != OPERANDS])
    rows = [kind[i : i + 2] for kind in kinds for i in range(0, len(kind), 2)]
    heights = [1.1 + 0.17 * min(TICKS, max(len(each.layers) for each in row)) for row in rows]
    with png(target, 0.9 + sum(heights), title, {"axes.grid": False}) as picture:
        draw(picture, rows, heights, figure, limits)


def draw(
    picture: Figure,
    rows: Sequence[Sequence[Map]],
    heights: Sequence[float],
    figure: str,
    limits: Limits,
) -> None:
    """Lay out the maps and add a colour bar for each group."""
    grid = picture.subplots(len(rows), 2, squeeze=False, height_ratios=heights)
    colours = matplotlib.colormaps["viridis" if figure in LIGHT_IS_HIGH else "viridis_r"].with_extremes(bad=BLANK)
    drawn: dict[str, tuple[Any, list[Axes]]] = {}
    for row, axes in zip(rows, grid):
        for each, ax in zip(row, axes):
            image = draw_map(ax, each, colours, limits[group(each)])
            drawn.setdefault(group(each), (image, []))[1].append(ax)
        for ax in axes[len(row) :]:
            ax.set_axis_off()
    for image, members in drawn.values():
        bar = picture.colorbar(image, ax=members, fraction=0.03, aspect=40, label=LABELS[figure])
        bar.outline.set_visible(False)  # type: ignore[operator]


def draw_map(ax: Axes, each: Map, colours: Any, limits: tuple[float, float]) -> Any:
    """Draw one map as an image, one cell per layer and logged step; label at most TICKS layers."""
    image = ax.imshow(each.values, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    every = -(-len(each.layers) // TICKS)
    ax.set_yticks(range(0, len(each.layers), every), [shortened(name) for name in each.layers[::every]], fontsize=7.5)
    few = evenly(len(each.steps), 6)
    ax.set_xticks(few, [f"{each.steps[i]:,}" for i in few])
    ax.set(title=each.name, xlabel="step")
    ax.tick_params(length=0, colors=QUIET)
    return image
