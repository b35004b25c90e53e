"""Assemble the page: one file with text, style, scripts and numbers, and a policy that forbids all requests."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from lowprec_train.tools.compare import colours, plot
from lowprec_train.tools.compare.measure import Comparison
from lowprec_train.tools.compare.page import numbers, sections
from lowprec_train.tools.compare.runs import Run

FOLDER = Path(__file__).parent
SCRIPTS = ("scale.js", "series.js", "chart.js", "panels.js", "heatmap.js", "contents.js", "page.js")


def to_html(comparison: Comparison, runs: Sequence[Run], *, figure: str = "sqnr_db", above: str = "") -> str:
    """The whole page; `runs` in the order of `comparison`, `figure` is what the heat maps show at first.

    above: sections, as HTML, that come before the charts.
    """
    parts = {
        "title": sections.escape(plot.title(comparison)),
        "style": palette(len(runs) - 1) + (FOLDER / "page.css").read_text(encoding="utf-8"),
        "numbers": script_json(numbers.of_comparison(comparison, runs, figure)),
        "script": "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "above": above,
        **sections.of_comparison(comparison),
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def palette(count: int) -> str:
    """The colours of curves.png as CSS variables, each with its twin for a dark ground; `count` runs and a baseline."""
    pairs = [*map(colours.of_run, range(count)), colours.BASELINE]
    names = [*map(str, range(count)), "baseline"]
    lines = [f"  --run-{name}: light-dark({light}, {dark});" for name, (light, dark) in zip(names, pairs)]
    return ":root {\n" + "\n".join(lines) + "\n}\n"


def script_json(tree: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
