"""Options that several commands have, and values of options, each described once."""

import argparse
from pathlib import Path


def trained_model(parser: argparse.ArgumentParser) -> None:
    """Which model computes, on what, and what text is to it: `evaluate`, `generate`."""
    parser.add_argument(
        "model", metavar="RUN", type=Path, help="run directory, a checkpoint of one, or what import-hf made"
    )
    step(parser)
    parser.add_argument(
        "--start", metavar="TOKEN", default="eod", help="before a text: eod, an id, or none (default: eod)"
    )
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="default: that of the run's data")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def step(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint of a run."""
    parser.add_argument("--step", metavar="N", type=int, help="checkpoint to take (default: the newest)")


def weights_directory(parser: argparse.ArgumentParser) -> None:
    """Where a model's files go, and how large they may be: `export-hf`, `import-hf`."""
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="2GB", help="of one file, and of memory (default: %(default)s)"
    )


def positive(text: str) -> int:
    """A count of at least one."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
