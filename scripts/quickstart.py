"""The demonstration: llama_tiny under bf16, fp8, mxfp4 and fp4 on the same batches, then their comparison.

bf16, fp8 and mxfp4 differ in precision only. fp4 is a whole system with its own optimizer states, so it runs twice:
`fp4-adamw` has the optimizer and the gradients of the others, and `fp4` is as published.

Every run is an ordinary `python -m lowprec_train.main +recipe=...`, one after another, with its progress bar; a run
that is finished is skipped and an interrupted one continues, so the same command can be repeated at any time. It ends
with `lowprec compare` as a gate: status 1 if a loss differs from bf16's by more than --max-gap, or if it is not below
the unigram entropy of the held-out text, which a network that uses its context reaches soon.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lowprec_train.tools import cli

RUNS = ("bf16", "fp8", "mxfp4", "fp4-adamw", "fp4")
SAME_OPTIMIZER = "-adamw"  # suffix of a run that has only the precision of a recipe
STEPS = 56
QUIET_WAIT = {"OMP_WAIT_POLICY": "passive"}  # threads that spin at barriers take the cores that the others need


def main() -> int:
    """Train, compare, print the next steps; return the exit status of the first failure."""
    arguments = parser().parse_args()
    started = time.monotonic()
    for number, recipe in enumerate(arguments.recipes, start=1):
        print(f"\n[{number}/{len(arguments.recipes)}] {recipe}", flush=True)
        status = train(recipe, arguments)
        if status:
            return status
    print(f"\nTrained in {clock(time.monotonic() - started)}.\n", flush=True)
    return compare(arguments)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description="Train llama_tiny under several recipes on the same batches and compare the losses.",
    )
    options.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides of every run, e.g. seed=7")
    options.add_argument(
        "--recipes", metavar="A,B", type=lambda text: text.split(","), default=RUNS, help=f"default: {','.join(RUNS)}"
    )
    options.add_argument(
        "--steps", metavar="N", type=int, default=STEPS, help="steps of every run (default: %(default)s)"
    )
    options.add_argument("--root", metavar="DIR", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    options.add_argument(
        "--max-gap", metavar="NATS", type=float, default=0.15, help="largest loss gap allowed (default: %(default)s)"
    )
    options.add_argument(
        "--environment", metavar="DIR", type=Path, help="say at the end how to activate this environment"
    )
    return options


def overrides(run: str) -> list[str]:
    """Return the overrides of a run: `fp4` is the recipe, `fp4-adamw` its precision with AdamW and BF16 gradients."""
    recipe = run.removesuffix(SAME_OPTIMIZER)
    return [f"+recipe={recipe}", *(["optim=adamw", "comm=bf16"] if recipe != run else [])]


def train(recipe: str, arguments: argparse.Namespace) -> int:
    """Do one run in a separate process on this terminal. Return 0 if it is finished, now or before."""
    command = [
        *(sys.executable, "-m", "lowprec_train.main", *overrides(recipe)),
        *(f"name={recipe}", f"run_root={arguments.root}", f"steps={arguments.steps}", *arguments.overrides),
    ]
    started = time.monotonic()
    status = call(command)
    if status:
        print(f"{recipe} failed with status {status}: {' '.join(command)}", file=sys.stderr)
        if (arguments.root / recipe / "config.yaml").exists():
            print(f"After a demo with other settings, give a new --root or remove {arguments.root}.", file=sys.stderr)
        return status if status > 0 else 128 - status
    if not (arguments.root / recipe / "DONE").exists():
        print(f"{recipe} was interrupted and saved; the same command continues it.", file=sys.stderr)
        return 130
    print(f"{recipe}: {clock(time.monotonic() - started)}", flush=True)
    return 0


def call(command: Sequence[str]) -> int:
    """Return the command's exit status. A run that gets a signal saves first, so this process waits for it."""
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends it to both processes
            for process in started:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        started.append(subprocess.Popen(command, env={**QUIET_WAIT, **os.environ}))
        return started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def compare(arguments: argparse.Namespace) -> int:
    """Print the report; return its exit status."""
    runs = [str(arguments.root / recipe) for recipe in arguments.recipes]
    out = arguments.root / "comparison"
    status = cli.main(["compare", *runs, "--max-gap", str(arguments.max_gap), "--out", str(out)])
    if status == 2:
        return status
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    if report["all_below_unigram"] is False:
        print(
            "A loss is not below the validation unigram entropy: that network does not use its context.",
            file=sys.stderr,
        )
        status = 1
    print(f"\nLook at {out.resolve() / 'curves.png'}; the table is {out / 'report.md'}.")
    if arguments.environment:
        print(f"To use the environment: source {arguments.environment / 'bin' / 'activate'}")
    return status


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


if __name__ == "__main__":
    sys.exit(main())
