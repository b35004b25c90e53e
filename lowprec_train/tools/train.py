"""`lowprec train +recipe=fp4`: the run of `torchrun train.py +recipe=fp4`, from any directory.

One process is this one. More of them, on the GPUs of this machine or for a trial on its CPU, are started and watched by
`train.processes`; for several machines there are torchrun and the scripts for Slurm (docs/slurm.md). What is no option
of ours goes to Hydra: `--cfg job`, `--multirun`.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from lowprec_train.train import signals

HELP = "train, or continue, a run"
DESCRIPTION = """\
Train, or continue, the run that the overrides describe. Ctrl-C saves and ends;
again aborts.
"""
EPILOG = None
PARSER = {
    "usage": "lowprec train [--gpus N | --nproc N] [KEY=VALUE ...] [Hydra's options]",
    "add_help": False,
    "allow_abbrev": False,
}
HELP_FLAGS = {"--help", "-h"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add those of `train`. What it does not know it leaves in `parsed.overrides` (see `cli.parse`)."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpus", metavar="N", help="train on N GPUs of this machine, a process each; or `all` (default: one process)"
    )
    where.add_argument(
        "--nproc", metavar="N", type=int, help="train with N processes on the CPU, e.g. to try a layout (gloo)"
    )
    parser.set_defaults(parser=parser, open=True)


def run(arguments: argparse.Namespace) -> int:
    """Train; the exit status. Bad overrides end in SystemExit, as `python train.py` has it."""
    if HELP_FLAGS & set(arguments.overrides):
        arguments.parser.print_help()
        print("\noverrides, and the other options:\n", flush=True)
    with signals.blocked():  # an interrupt waits for whoever can answer it
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
    """How many to start. ValueError for a number that this machine cannot have."""
    from lowprec_train.train.launch import world

    if arguments.gpus is None and arguments.nproc is None:
        return 1
    if world().processes > 1:
        raise ValueError(
            f"WORLD_SIZE={world().processes}: a launcher has started this process; leave --gpus and --nproc out"
        )
    if arguments.gpus is not None:
        return gpus(arguments.gpus)
    if arguments.nproc < 1:
        raise ValueError(f"--nproc {arguments.nproc}: must be at least 1")
    nproc: int = arguments.nproc
    return nproc


def gpus(asked: str) -> int:
    """A number of GPUs, or `all`, as a number. ValueError for one that torch does not see here."""
    import torch

    visible = torch.cuda.device_count()
    if not visible:
        raise ValueError(
            f"--gpus {asked}: torch sees no GPU on this machine; --nproc N trains with N processes on the CPU"
        )
    count = visible if asked == "all" else int(asked) if asked.isdecimal() else 0
    if not 1 <= count <= visible:
        raise ValueError(f"--gpus {asked}: must be a number from 1 to {visible}, the GPUs of this machine, or `all`")
    return count


def here(overrides: Sequence[str]) -> int:
    """Train in this process. Classes that overrides name may lie in this directory, as for `python -m`."""
    from lowprec_train import main

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file here replaces no module of anybody's
    before, sys.argv = sys.argv, ["lowprec train", *overrides]
    try:
        main.main()
    finally:
        sys.argv = before
    return 0
