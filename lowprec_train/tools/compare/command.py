"""Compare training runs on the same data: loss gap to a baseline at matched steps and tokens, held-out loss, spikes,
speed, memory and what differs between their configurations. Reads run directories, finished or still growing;
needs no GPU.

Writes report.md (also printed), curves.png and report.json. For runs with telemetry it also writes heatmap-NAME.png:
one statistic of every quantisation, layer by step. --html also writes report.html: one self-contained page with
interactive curves and all telemetry. The report defines each number at its end.

exit status:
  0  done; with --max-gap: every gap is within the limit
  1  --max-gap: a gap exceeds the limit or is not finite, or an unfinished run ends before the others
  2  bad input: missing run or metrics, different corpora, no common steps

examples:
  lowprec compare runs/bf16 runs/fp4
  lowprec compare runs/demo/* --baseline bf16 --max-gap 0.15 --out report
  lowprec compare runs/fp8 runs/fp4 --heatmap underflow_pct
  lowprec compare runs/* --html && xdg-open runs/comparison/report.html
"""

import argparse
import math
from contextlib import suppress
from pathlib import Path

from lowprec_train.tools import options
from lowprec_train.tools.compare import measure, report
from lowprec_train.tools.compare.runs import read_runs
from lowprec_train.tools.compare.telemetry import LABELS

HELP = "loss gap, speed and memory of runs against a baseline"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=options.path, help="run directory; two or more")
    parser.add_argument(
        "--baseline", metavar="NAME", help="baseline run, by name or directory (default: the first bf16 run)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=options.path,
        help="output directory (default: 'comparison' in the runs' common parent, else in the current directory)",
    )
    parser.add_argument(
        "--max-gap", metavar="NATS", type=nats, help="exit with status 1 if the absolute gap of a run exceeds this"
    )
    parser.add_argument(
        "--smooth",
        metavar="N",
        type=options.positive,
        help="window of smoothing and of the final mean, in logged steps (default: a tenth of the run, 30 to 200)",
    )
    parser.add_argument(
        "--heatmap",
        metavar="FIGURE",
        default="sqnr_db",
        choices=LABELS,
        help=f"statistic of the heat maps: {', '.join(LABELS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--html", action="store_true", help="also write report.html: one page to open in a browser, no network needed"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report. Returns 1 if --max-gap fails. Raises ValueError or OSError for bad input."""
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
    """Return `comparison` in the runs' common parent directory, or in the current directory if they have none."""
    parents = {path.resolve().parent for path in paths}
    return (paths[0].parent if len(parents) == 1 else Path()) / "comparison"


def nats(text: str) -> float:
    """Parse a finite gap of at least 0."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be a finite number of nats, at least 0")
