"""The `lowprec` command: one word per job, `lowprec compare RUN RUN ...`.

A subcommand is a module with `register(subparsers)`, which adds a parser whose default `run` takes the parsed arguments
and returns the exit status. Statuses are the same for all: 0 done, 1 the answer is no (a gate that fails), 2 bad input,
said in one line; `train` has those of train.py, 1 for every failure. Nothing here imports torch before it is needed.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from lowprec_train import __version__
from lowprec_train.tools import (
    compare,
    export_hf,
    generate,
    import_hf,
    inspect_data,
    prepare_data,
    train,
    train_tokenizer,
)
from lowprec_train.tools.bench import command as bench
from lowprec_train.tools.estimate import command as estimate
from lowprec_train.tools.evaluate import command as evaluate

COMMANDS = (
    train,
    compare,
    bench,
    estimate,
    train_tokenizer,
    prepare_data,
    inspect_data,
    export_hf,
    import_hf,
    evaluate,
    generate,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; argparse itself exits 2 on a wrong option."""
    parsed = parse(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"lowprec {parsed.command}: error: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of one subcommand. What `train` does not know is for Hydra, in order, as `overrides`."""
    top = parser()
    parsed, rest = top.parse_known_args(arguments)
    if parsed.command == "train":
        parsed.overrides = rest
    elif rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def parser() -> argparse.ArgumentParser:
    """The whole command line, as a value: documentation and tests read it too."""
    top = argparse.ArgumentParser(
        prog="lowprec", description="Low-precision pretraining: runs, and the tools around them."
    )
    top.add_argument("--version", action="version", version=version())
    subparsers = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return top


def version() -> str:
    """Version of the package and of what decides its numbers, e.g. for a bug report."""
    return f"lowprec_train {__version__} (torch {metadata.version('torch')}, Python {platform.python_version()})"


if __name__ == "__main__":
    sys.exit(main())
