"""The picture of a step: which kernels and collectives of a GPU run when, one panel per profiled contestant.

There is one line per class of kernel (compute) and per collective (communication), in milliseconds from the first
kernel of the step, from a profile of rank 0. All panels have the same scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.path
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from lowprec_train.tools.bench.timeline import COLLECTIVES, COMMUNICATION, intervals, joined
from lowprec_train.tools.compare import colours
from lowprec_train.tools.compare.plot import STYLE
from lowprec_train.train.diagnostics.kernel_times import CLASSES, OTHER

COMPUTE = ("gemm", "attention", *(name for name in CLASSES if name not in ("gemm", "attention", COMMUNICATION)), OTHER)
TRACKS = (*COMPUTE, *COLLECTIVES, COMMUNICATION)  # top to bottom
PIXELS = 1000  # across; shorter gaps are not drawn


def save(result: Mapping[str, Any], file: Path, only: Iterable[str] = ()) -> bool:
    """Draw the profiled contestants, or those named in `only`. Returns False if the result has no timeline. Raises
    ValueError for a name that has none.
    """
    profiles = {name: each["timeline"] for name, each in result.get("profiles", {}).items() if each.get("timeline")}
    chosen = list(only) or list(profiles)
    if missing := [name for name in chosen if name not in profiles]:
        raise ValueError(f"no timeline of {missing[0]!r} in this result; there are {', '.join(profiles) or 'none'}")
    if not chosen:
        return False
    found = {name: {each: intervals(text) for each, text in profiles[name].items()} for name in chosen}
    used = [name for name in TRACKS if any(name in each for each in found.values())]
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x", "svg.hashsalt": "timeline"}):
        figure = Figure(figsize=(10.5, 0.5 + len(found) * (0.6 + 0.19 * len(used))), layout="constrained")
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        until = max(end for each in found.values() for bars in each.values() for _, end in bars)
        for axes, (name, by_track) in zip(panels, found.items(), strict=True):
            draw(axes, {each: joined(bars, until / PIXELS) for each, bars in by_track.items()}, used)
            axes.set_title(name)
        panels[-1].set_xlabel("ms from the first kernel of the step")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=160)
    return True


def draw(axes: Any, by_track: Mapping[str, list[tuple[float, float]]], used: list[str]) -> None:
    """Draw one panel: a line of bars per track of `used`, each line one element of the SVG."""
    compute, communication = colours.of_run(0)[0], colours.of_run(1)[0]
    for place, name in enumerate(used):
        if bars := [corners(begin / 1e3, end / 1e3, place) for begin, end in by_track.get(name, [])]:
            outline = matplotlib.path.Path.make_compound_path(*bars)
            axes.add_patch(PathPatch(outline, color=compute if name in COMPUTE else communication, linewidth=0))
    axes.autoscale_view()
    axes.set_yticks(range(len(used)), used)
    axes.set_ylim(len(used) - 0.5, -0.5)


def corners(begin: float, end: float, place: int) -> matplotlib.path.Path:
    """Return a rectangle of height 0.8 around `place`."""
    low, high = place - 0.4, place + 0.4
    return matplotlib.path.Path([(begin, low), (end, low), (end, high), (begin, high), (begin, low)], closed=True)
