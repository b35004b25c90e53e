"""`lowprec evaluate`: the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lowprec_train.tools import options

HELP = "perplexity, bits per byte and tasks of a trained model, under its recipe and in BF16"
DESCRIPTION = """\
How good a trained model is, under the recipe that it trained with and in BF16: perplexity and bits per byte of any
text, and tasks of lm-evaluation-harness. The difference between the two is what the recipe costs in use.
"""
EPILOG = """\
Text is what `lowprec prepare-data` reads, .txt, .md, .jsonl and .parquet, or directories of them; or a set in
Megatron's layout, named by its prefix. Each document is by itself, after the end-of-document token, as in training;
every token of it is predicted once, its closing token is not (docs/evaluation.md).

A recipe is `run`, a name of configs/recipe, or `fp32`: nothing rounded, for comparison with other programs.

exit status:
  0  done
  2  bad input: no checkpoint, no such text or recipe, no tokenizer, a package that is missing

examples:
  lowprec evaluate runs/fp4 --data valid.jsonl.zst
  lowprec evaluate runs/fp4 --data data/mix_valid --stride 128 --out fp4.json
  lowprec evaluate runs/bf16 --data valid.jsonl --recipe bf16 fp8 fp4
  lowprec evaluate runs/fp4 --tasks tasks/questions.yaml
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.trained_model(parser)
    parser.add_argument(
        "--data", metavar="PATH", type=Path, help="file or directory of text, or prefix of a prepared set"
    )
    parser.add_argument(
        "--tasks", metavar="FILE", type=Path, nargs="+", default=[], help="task files of lm-evaluation-harness"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        nargs="+",
        default=["run", "bf16"],
        dest="recipes",
        help="to compute with (default: run bf16)",
    )
    parser.add_argument(
        "--seq-len", metavar="N", type=int, help="tokens of a window (default: those of the run's sequences)"
    )
    parser.add_argument("--stride", metavar="N", type=int, help="tokens from window to window (default: --seq-len)")
    parser.add_argument(
        "--batch", metavar="N", type=int, default=8, help="windows computed together (default: %(default)s)"
    )
    parser.add_argument("--limit", metavar="N", type=int, help="documents, of the text and of each task (default: all)")
    parser.add_argument("--field", default="text", help="of .jsonl lines and .parquet rows (default: %(default)s)")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out text that cannot be read instead of stopping"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the results as JSON, too")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model; print the results and write them as JSON. Raises ValueError or OSError for bad input."""
    from lowprec_train.tools.evaluate import report
    from lowprec_train.tools.evaluate.evaluation import Evaluation

    if arguments.out:
        _check_writable(arguments.out)
    found = Evaluation.of(arguments).results()
    print(report.text(found))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"Saved {arguments.out}")
    return 0


def _check_writable(out: Path) -> None:
    """Raises ValueError where no file can be made: found before anything is computed."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a directory")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}")
