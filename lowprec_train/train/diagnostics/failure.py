"""Report the failure of a process: once on the terminal, and in a file for its launcher.

A launcher names a file a process in TORCHELASTIC_ERROR_FILE. torchrun quotes it in the last lines of its own report.
`lowprec train` prints the earliest one of all processes and nothing else (`train.processes`), so that one mistake is
one message; LOWPREC_LAUNCHER says that it does.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowprec_train.train.signals import StopRequest


def report(text: str, *, printed: bool = True) -> None:
    """Say why this process fails, to the launcher that asks for it and to whoever reads stderr.

    printed: False where another process prints it for all.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    if printed and not (path and "LOWPREC_LAUNCHER" in os.environ):
        print(text, file=sys.stderr, flush=True)


def reported(path: str) -> str | None:
    """What a process reported in its file; None for a process that ended without a word."""
    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return json.load(file)["message"]["message"]
    return None  # no file, or one that was cut short with its process


@contextmanager
def abort_explained(run: Path, stop: StopRequest) -> Iterator[None]:
    """Make an abort within the block one KeyboardInterrupt that says what a run's directory has to continue from.

    torch's checkpoints report an interrupt as an error of theirs, so the request is asked and not the exception.
    """
    try:
        yield
    except BaseException as again:
        if not stop.aborted:
            raise
        checkpoints = run / "checkpoints"
        latest = checkpoints / "latest"
        stands = f"{checkpoints / latest.read_text().strip()} stands" if latest.exists() else f"{run} has no checkpoint"
        raise KeyboardInterrupt(f"; {stands}") from again
