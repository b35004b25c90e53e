"""`lowprec compare`: the loss gap between runs on the same data as a table, a figure, JSON and, if asked, a verdict."""

import argparse
import math
from contextlib import suppress
from pathlib import Path

from lowprec_train.tools import options
from lowprec_train.tools.compare import measure, report
from lowprec_train.tools.compare.runs import read_runs
from lowprec_train.tools.compare.telemetry import LABELS

HELP = "loss gap, speed and memory of runs against a baseline"
DESCRIPTION = """\
Compare training runs on the same data: loss gap to a baseline at matched steps and tokens, held-out loss, spikes,
speed, memory and what differs between their configurations. Reads run directories, finished or still growing;
needs no GPU.
"""

EPILOG = """\
Writes report.md (also printed), curves.png and report.json, and heatmap-NAME.png for runs with telemetry: a figure of
every rounding, layer by step. With --html also report.html: all of it on one page, with curves to hover and zoom and
every figure of telemetry to choose from; one file, which needs no network. How each number is made is said at the end.

exit status:
  0  done; with --max-gap: every gap is within it
  1  --max-gap: a gap is larger, either way, or not a number; or an unfinished run ends before the others
  2  bad input: no such run, no metrics, different corpora, no common steps

examples:
  lowprec compare runs/bf16 runs/fp4
  lowprec compare runs/demo/* --baseline bf16 --max-gap 0.15 --out report
  lowprec compare runs/fp8 runs/fp4 --heatmap underflow_pct
  lowprec compare runs/* --html && xdg-open runs/comparison/report.html
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory; two or more")
    parser.add_argument(
        "--baseline", metavar="NAME", help="run to measure against, by name or directory (default: the first bf16 run)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where the report goes (default: 'comparison' beside the runs, or here when they lie apart)",
    )
    parser.add_argument(
        "--max-gap", metavar="NATS", type=nats, help="gate: exit 1 when a gap exceeds this, above or below the baseline"
    )
    parser.add_argument(
        "--smooth",
        metavar="N",
        type=options.positive,
        help="logged steps in a smoothed point and in the final mean (default: a tenth of the run, within 30 and 200)",
    )
    parser.add_argument(
        "--heatmap",
        metavar="FIGURE",
        default="sqnr_db",
        choices=LABELS,
        help=f"what the heat maps show: {', '.join(LABELS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--html", action="store_true", help="also write report.html: one page to open in a browser, no network needed"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, measure, write, print. Returns 1 when the gate says no; raises ValueError or OSError for bad input."""
    from lowprec_train.tools.compare import heatmap, plot
    from lowprec_train.tools.compare.page import document

    runs = read_runs(arguments.runs)
    comparison = measure.compare(runs, baseline=arguments.baseline, window=arguments.smooth, max_gap=arguments.max_gap)
    out = arguments.out or default_out([each.path for each in runs])
    out.mkdir(parents=True, exist_ok=True)
    plot.save(comparison, runs, out / "curves.png")
    maps, notes = heatmap.save(runs, arguments.heatmap, out)
    text = report.to_markdown(comparison, figure="curves.png", heatmaps=[each.name for each in maps])
    (out / "report.md").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(report.to_json(comparison), encoding="utf-8")
    print(text)
    written = [out / "report.md", out / "curves.png", out / "report.json", *maps]
    if arguments.html:
        written.append(out / "report.html")
        written[-1].write_text(document.to_html(comparison, runs, figure=arguments.heatmap), encoding="utf-8")
    print(*notes, f"Saved {', '.join(map(str, written))}", sep="\n")
    return 1 if comparison.failures else 0


def default_out(paths: list[Path]) -> Path:
    """Beside the runs when they share a folder, else here."""
    parents = {path.resolve().parent for path in paths}
    return (paths[0].parent if len(parents) == 1 else Path()) / "comparison"


def nats(text: str) -> float:
    """A gap: finite and not negative."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of nats, 0 or more")
