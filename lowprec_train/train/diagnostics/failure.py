"""Report the failure of a process: once on the terminal, and in a file for its launcher.

A launcher names one file per process in TORCHELASTIC_ERROR_FILE. torchrun quotes it at the end of its own report.
`lowprec train`, which sets LOWPREC_LAUNCHER, prints only the earliest report of all processes (`train.processes`), so
that one error gives one message.
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
    """Report why this process fails: in the launcher's file, and on stderr.

    printed: False if another process prints it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)
    if printed and not (path and "LOWPREC_LAUNCHER" in os.environ):
        print(text, file=sys.stderr, flush=True)


def reported(path: str) -> str | None:
    """Return what a process reported in its file; None without a report."""
    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return json.load(file)["message"]["message"]
    return None  # no file, or an incomplete one


@contextmanager
def abort_explained(run: Path, stop: StopRequest) -> Iterator[None]:
    """Turn an abort within the block into one KeyboardInterrupt that names the run's last checkpoint.

    torch's checkpoints replace an interrupt by their own error, so the stop request is checked, not the exception.
    """
    try:
        yield
    except BaseException as again:
        if not stop.aborted:
            raise
        checkpoints = run / "checkpoints"
        latest = checkpoints / "latest"
        state = (
            f"{checkpoints / latest.read_text().strip()} is intact" if latest.is_file() else f"{run} has no checkpoint"
        )
        raise KeyboardInterrupt(f"; {state}") from again
