"""The numbers that the page draws, packed: a page of ten long runs stays a few megabytes.

- Losses are FP32, every logged step up to `POINTS` a run; longer runs are means of as many neighbours as it takes.
  Their gaps are then means of the differences at the steps that both runs logged, since runs may log different ones.
  Spikes and non-finite steps come from all steps.
- Steps and tokens grow by the same amount nearly everywhere: only the places where the amount changes are written.
- All other series share a budget of bytes; so do the cells of the heat maps, which are 8-bit codes between the smallest
  and largest value of their map (an error of at most 0.2 % of that range).

Arrays are base64 of little-endian bytes. What has no number is null, also where JSON has no word for it.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from lowprec_train.tools.compare import heatmap
from lowprec_train.tools.compare.curves import Interval, at_common_steps
from lowprec_train.tools.compare.heatmap import LIGHT_IS_HIGH
from lowprec_train.tools.compare.measure import RATE, Comparison, RunReport
from lowprec_train.tools.compare.plot import DASHES, subjects_of
from lowprec_train.tools.compare.runs import LOSS, TOKENS, VALID, Array, Run, Series
from lowprec_train.tools.compare.telemetry import FILE, LABELS, Map, maps, read_rows

POINTS = 10_000  # of a loss curve
METRIC_POINTS = 1_000  # of any other series
METRIC_BYTES = 1_500_000  # of these together
CELL_BYTES = 2_000_000  # of all heat maps together
NO_NUMBER, LOWEST, HIGHEST = 0, 1, 255  # codes of a cell
COLOURS = 32  # samples of the heat maps' colours
LINE_WIDTH = 2  # pixels


def of_comparison(comparison: Comparison, runs: Sequence[Run], figure: str) -> dict[str, Any]:
    """Everything the scripts read, as values that strict JSON can hold; `runs` in the order of `comparison`."""
    every = -(-max(len(run.loss.steps) for run in runs) // POINTS)
    union = np.unique(np.concatenate([run.loss.steps for run in runs]))
    metric_points = allotted(runs)
    subjects, _ = subjects_of(comparison, runs)
    baseline = [run.label for run in runs].index(comparison.baseline)
    return {
        "baseline": baseline,
        "window": comparison.window,
        "unigram": finite(comparison.unigram_entropy),
        "gate": comparison.max_gap,
        "every": every,
        "runs": [
            of_run(run, report, pooled(run.loss, every, union), metric_points)
            | {"matched": matched(run.loss, runs[baseline].loss, every, union) if every > 1 else None}
            | look(subject.place)
            for run, report, subject in zip(runs, comparison.runs, subjects)
        ],
        "telemetry": of_telemetry(runs, figure),
    }


def look(place: int | None) -> dict[str, Any]:
    """Which colour and dashes a run has in curves.png. place: as of `plot.Subject`."""
    dash = (
        None if place is None else " ".join(f"{LINE_WIDTH * length:.1f}" for length in DASHES[place % len(DASHES)][1])
    )
    return {"place": place, "dash": dash}


def of_run(run: Run, report: RunReport, loss: Series, metric_points: int) -> dict[str, Any]:
    """One run: its curve, what is marked on it, where its gap ends, and every other series."""
    tokens, valid, gap, held = run.series(TOKENS), run.series(VALID), report.gap_steps, report.validation
    others = (name for name in run.metrics if name not in (LOSS, TOKENS, VALID))
    seen = np.interp(loss.steps, tokens.steps, tokens.values) if len(tokens.steps) else None
    return {
        "name": run.label,
        "steps": knots(loss.steps),
        "loss": packed(loss.values),
        "tokens": None if seen is None else knots(seen.round()),
        "rate": finite(report.tokens_per_second) if len(run.series(RATE).steps) else None,
        "valid": {"steps": valid.steps.tolist(), "values": [finite(value) for value in valid.values.tolist()]},
        "spikes": [[each.step, each.loss, each.excess, each.length] for each in report.spikes],
        "nonfinite": report.nonfinite_steps[:METRIC_POINTS],
        "final": interval(report.final_loss),
        "gap": interval(gap.nats) if gap else None,
        "held": finite(held.gap) if held else None,
        "metrics": {name: of_metric(run.series(name), metric_points) for name in others},
    }


def interval(value: Interval) -> dict[str, float | None]:
    return {"mean": finite(value.mean), "low": finite(value.low), "high": finite(value.high)}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def allotted(runs: Sequence[Run]) -> int:
    """How many points each of the lesser series may have, so that all of them keep to their budget."""
    count = sum(len(run.metrics) for run in runs)
    return max(2, min(METRIC_POINTS, METRIC_BYTES * 3 // (4 * 4 * count)))


def of_metric(series: Series, points: int) -> dict[str, Any]:
    every = -(-len(series.steps) // points)
    thin = pooled(series, every, series.steps)
    return {"steps": knots(thin.steps), "values": packed(thin.values), "every": every}


def pooled(series: Series, every: int, union: Array) -> Series:
    """Means of `every` neighbours among the steps `union`, each at the last of its steps."""
    if every == 1 or not len(series.steps):
        return series
    bucket = np.searchsorted(union, series.steps) // every
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    ends = np.append(starts[1:], len(bucket))
    return Series(steps=series.steps[ends - 1], values=np.add.reduceat(series.values, starts) / (ends - starts))


def matched(loss: Series, base: Series, every: int, union: Array) -> dict[str, Any]:
    """The gap at the steps that both have, pooled as a loss is: points of two pooled losses are means over steps that
    only one of them may have, and stand where its own steps end.
    """
    steps, values, reference = at_common_steps(loss, base)
    with np.errstate(invalid="ignore"):  # between infinities there is no difference
        gap = pooled(Series(steps=steps, values=values - reference), every, union)
    return {"steps": knots(gap.steps), "values": packed(gap.values)}


def knots(values: Array) -> list[int]:
    """[index, value, ...] of whole numbers between which there is a straight line."""
    last = len(values) - 1
    turns = np.flatnonzero(np.diff(values, 2)) + 1 if last > 0 else np.array([], int)
    return [int(each) for i in sorted({0, *turns.tolist(), last}) for each in (i, values[i])] if last >= 0 else []


def packed(values: Array, kind: str = "<f4") -> str:
    with np.errstate(over="ignore"):  # what FP32 cannot hold is infinite, and drawn as such
        return base64.b64encode(values.astype(kind).tobytes()).decode("ascii")


def of_telemetry(runs: Sequence[Run], chosen: str) -> dict[str, Any] | None:
    """All figures of all runs that have any, on common colour scales for all runs, the chosen one first; None without
    telemetry.
    """
    rows = {place: read_rows(run.path / FILE) for place, run in enumerate(runs)}
    figures = dict.fromkeys((chosen, *LABELS))
    found = {figure: {place: maps(rows[place], figure) for place in rows if rows[place]} for figure in figures}
    found = {figure: of_runs for figure, of_runs in found.items() if any(of_runs.values())}
    if not found:
        return None
    all_maps = [each for of_runs in found.values() for of_run in of_runs.values() for each in of_run]
    layers = list(dict.fromkeys(layer for each in all_maps for layer in each.layers))
    number = {layer: i for i, layer in enumerate(layers)}
    size = sum(each.values.size for each in all_maps if not constant(each.values))
    every = max(1, -(-size * 4 // (3 * CELL_BYTES)))
    viridis = matplotlib.colormaps["viridis"](np.linspace(0, 1, COLOURS))
    return {
        "colours": [[round(255 * float(part)) for part in colour[:3]] for colour in viridis],
        "layers": layers,
        "every": every,
        "figures": {figure: of_figure(figure, of_runs, number, every) for figure, of_runs in found.items()},
    }


def of_figure(
    figure: str, of_runs: Mapping[int, Sequence[Map]], number: Mapping[str, int], every: int
) -> dict[str, Any]:
    """One figure: its label, the ends of its colour scales, its maps run by run."""
    return {
        "label": LABELS[figure],
        "lightIsHigh": figure in LIGHT_IS_HIGH,
        "limits": heatmap.scales(each for of_run in of_runs.values() for each in of_run),
        "runs": {place: [of_map(each, number, every) for each in of_run] for place, of_run in of_runs.items()},
    }


def of_map(each: Map, number: Mapping[str, int], every: int) -> dict[str, Any]:
    """One map: cells row by row as codes, one code where all cells are the same."""
    steps, values = pooled_columns(each, every)
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    step = (high - low) / (HIGHEST - LOWEST) or 1.0
    codes = np.where(np.isfinite(values), LOWEST + np.nan_to_num((values - low) / step).round(), NO_NUMBER)
    return {
        "name": each.name,
        "group": heatmap.group(each),
        "layers": knots(np.array([number[layer] for layer in each.layers])),
        "steps": knots(steps),
        "low": low,
        "high": high,
        "cells": int(codes.flat[0]) if (codes == codes.flat[0]).all() else packed(codes, "u1"),
    }


def constant(values: Array) -> bool:
    return bool(np.array_equal(values, np.broadcast_to(values.flat[0], values.shape), equal_nan=True))


def pooled_columns(each: Map, every: int) -> tuple[Array, Array]:
    """(steps, values) with `every` neighbouring watched steps in a column: the mean of what has a number."""
    steps = np.array(each.steps)
    if every == 1:
        return steps, each.values
    starts = np.arange(0, len(steps), every)
    known = np.isfinite(each.values)
    sums = np.add.reduceat(np.where(known, each.values, 0.0), starts, axis=1)
    counts = np.add.reduceat(known.astype(int), starts, axis=1)
    ends = np.append(starts[1:], len(steps)) - 1
    return steps[ends], np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
