"""Stands in for train.py, without torch: a rank that waits to be told to stop, saves slowly, or crashes once.

Overrides: name, do=wait|crash. It leaves one line a start in ranks.txt.
"""

import os
import signal
import sys
import time
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAVE_SECONDS = 2.0


def main(overrides):
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run = Path("runs", overrides["name"])
    run.mkdir(parents=True, exist_ok=True)
    asked = []
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in SIGNALS}
    try:
        return work(run, rank, restart, overrides, asked)
    finally:
        for number, handler in before.items():
            assert handler == signal.SIG_IGN, "torchrun was started deaf, and so are its ranks before and after"
            signal.signal(number, handler)


def work(run, rank, restart, overrides, asked):
    with Path("ranks.txt").open("a") as file:
        file.write(f"{rank} of {os.environ['WORLD_SIZE']}, restart {restart}\n")
    if (run / "checkpoint").exists() or (overrides["do"] == "crash" and restart):
        return end(run, rank, "DONE")
    if overrides["do"] == "crash" and rank == 1:
        return 3
    while not asked:
        time.sleep(0.05)
    time.sleep(float(overrides.get("save", SAVE_SECONDS)))
    (run / "checkpoint").touch()
    return end(run, rank, "PREEMPTED") if overrides["do"] == "wait" else 1


def end(run, rank, outcome):
    if rank == 0:
        (run / outcome).touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(dict(word.split("=", 1) for word in sys.argv[1:])))
