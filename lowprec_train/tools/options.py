"""Command-line options that several commands share, and parsers of option values."""

import argparse
from pathlib import Path


def trained_model(parser: argparse.ArgumentParser) -> None:
    """Add options that select a trained model, its tokenizer and the device: for `evaluate` and `generate`."""
    parser.add_argument(
        "model", metavar="RUN", type=path, help="run directory, checkpoint, or directory made by import-hf"
    )
    step(parser)
    parser.add_argument(
        "--start",
        metavar="TOKEN",
        default="eod",
        help="token before each text: eod, a token id, or none (default: eod)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", type=path, help="tokenizer (default: that of the run's data)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def step(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects a checkpoint of a run."""
    parser.add_argument("--step", metavar="N", type=int, help="step of the checkpoint (default: the newest)")


def weights_directory(parser: argparse.ArgumentParser) -> None:
    """Add options for the output directory and the size of its files: for `export-hf` and `import-hf`."""
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="directory to create")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="2GB",
        help="maximum size of a file, and of the memory used (default: %(default)s)",
    )


def check_directory_above(out: Path) -> None:
    """Raises ValueError if the directories of an output path cannot be made, because one of them is a file."""
    nearest = next(path for path in out.absolute().parents if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"--out {out}: {nearest} is not a directory")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def path(text: str) -> Path:
    """Parse a path. An empty one, as of a shell variable that is not set, would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)
