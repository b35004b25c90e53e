"""Evaluate a trained model under its training recipe and in BF16: perplexity and bits per byte of a text, and tasks of
lm-evaluation-harness. The difference shows how much the recipe's rounding costs at inference.

--data is a .txt, .md, .jsonl or .parquet file, a directory of such files, or the prefix of a data set in Megatron's
layout. Documents are evaluated independently. Each starts after the end-of-document token, as in training, and each of
its tokens is predicted once; the closing token is not predicted (docs/evaluation.md).

--recipe names: `run` (the run's recipe), any recipe of configs/recipe, or `fp32` (no rounding, for comparison with
other programs).

exit status:
  0  done
  2  bad input: missing checkpoint, text, tokenizer or package, or an unknown recipe

examples:
  lowprec evaluate runs/fp4 --data valid.jsonl.zst
  lowprec evaluate runs/fp4 --data data/mix_valid --stride 128 --out fp4.json
  lowprec evaluate runs/bf16 --data valid.jsonl --recipe bf16 fp8 fp4
  lowprec evaluate runs/fp4 --tasks tasks/questions.yaml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lowprec_train.tools import options

HELP = "perplexity, bits per byte and tasks of a trained model, under its recipe and in BF16"


def add_options(parser: argparse.ArgumentParser) -> None:
    options.trained_model(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=options.path,
        help="text file, directory of text files, or prefix of a prepared data set",
    )
    parser.add_argument(
        "--tasks", metavar="FILE", type=options.path, nargs="+", default=[], help="task files of lm-evaluation-harness"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        nargs="+",
        default=["run", "bf16"],
        dest="recipes",
        help="recipes to evaluate with (default: run bf16)",
    )
    parser.add_argument(
        "--seq-len", metavar="N", type=int, help="tokens per window (default: the sequence length of the run)"
    )
    parser.add_argument(
        "--stride", metavar="N", type=int, help="tokens between the starts of two windows (default: --seq-len)"
    )
    parser.add_argument("--batch", metavar="N", type=int, default=8, help="windows per batch (default: %(default)s)")
    parser.add_argument(
        "--limit", metavar="N", type=int, help="use the first N documents of the text and of each task (default: all)"
    )
    parser.add_argument(
        "--field", default="text", help="field of .jsonl lines and .parquet rows with the text (default: %(default)s)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip unreadable text instead of stopping")
    parser.add_argument("--out", metavar="FILE", type=options.path, help="also write the results to a JSON file")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model, print the results and write the JSON file. Raises ValueError or OSError for bad input."""
    from lowprec_train.tools.evaluate import report
    from lowprec_train.tools.evaluate.evaluation import Evaluation
    from lowprec_train.train.launch import check_one_process

    check_one_process("lowprec evaluate")
    if arguments.out:
        _check_writable(arguments.out)
    found = Evaluation.of(arguments).results()
    print(report.text(found))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"Saved {arguments.out}")
    return 0


def _check_writable(out: Path) -> None:
    """Raises ValueError if the file cannot be created, before the evaluation starts."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a directory")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: directory {out.parent} does not exist; create it first")
