"""Train, or continue, the run that the overrides describe. Ctrl-C saves and ends; again aborts."""

import argparse
import os
import sys
from collections.abc import Sequence

from lowprec_train.train import signals

HELP = "train, or continue, a run"
PARSER = {
    "usage": "lowprec train [--gpus N | --nproc N] [KEY=VALUE ...] [Hydra's options]",
    "add_help": False,
    "allow_abbrev": False,
}
HELP_FLAGS = {"--help", "-h"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`. Unknown arguments go to `parsed.overrides` (see `cli.parse`)."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpus", metavar="N", help="train on N GPUs of this machine, a process each; or `all` (default: one process)"
    )
    where.add_argument(
        "--nproc", metavar="N", type=int, help="train with N processes on the CPU, e.g. to try a layout (gloo)"
    )
    parser.set_defaults(parser=parser, open=True)


def run(arguments: argparse.Namespace) -> int:
    """Train as `torchrun train.py` does, from any directory, and return the exit status. Raises SystemExit for bad
    overrides, as `python train.py` does.

    A run with one process uses this process. `train.processes` starts and watches several processes, on the GPUs of
    this machine or for a trial on its CPU. For several machines use torchrun or the scripts for Slurm (docs/slurm.md).
    Unknown options, such as `--cfg job` or `--multirun`, go to Hydra.
    """
    if HELP_FLAGS & set(arguments.overrides):
        arguments.parser.print_help()
        print("\noverrides, and the other options:\n", flush=True)
    with signals.blocked():  # an interrupt waits until a handler is installed
        try:
            count = processes(arguments)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        overrides = (["device=cpu"] if arguments.nproc else []) + arguments.overrides
        if count == 1:
            return here(overrides)
        from lowprec_train.train.processes import launch

        return launch(count, overrides)


def processes(arguments: argparse.Namespace) -> int:
    """Return the number of processes to start. Raises ValueError for a number that this machine does not support."""
    from lowprec_train.train.launch import world

    if arguments.gpus is None and arguments.nproc is None:
        return 1
    if world().processes > 1:
        raise ValueError(
            f"WORLD_SIZE={world().processes}: a launcher has started this process; remove --gpus and --nproc"
        )
    if arguments.gpus is not None:
        return gpus(arguments.gpus)
    if arguments.nproc < 1:
        raise ValueError(f"--nproc {arguments.nproc}: must be at least 1")
    return arguments.nproc


def gpus(text: str) -> int:
    """Parse a number of GPUs, or `all`. Raises ValueError for a number that torch does not see on this machine."""
    import torch

    visible = torch.cuda.device_count()
    if not visible:
        raise ValueError(
            f"--gpus {text}: torch sees no GPU on this machine; --nproc N trains with N processes on the CPU"
        )
    count = visible if text == "all" else int(text) if text.isdecimal() else 0
    if not 1 <= count <= visible:
        raise ValueError(f"--gpus {text}: must be a number from 1 to {visible}, the GPUs of this machine, or `all`")
    return count


def here(overrides: Sequence[str]) -> int:
    """Train in this process. Overrides may name classes in the current directory, as with `python -m`."""
    from lowprec_train import main

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file here does not replace another module
    before, sys.argv = sys.argv, ["lowprec train", *overrides]
    try:
        main.main()
    finally:
        sys.argv = before
    return 0
