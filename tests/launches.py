"""Processes of tests, forked from a server that has imported torch and the package once: a start costs no import."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADED = ["torch.distributed.fsdp", "lowprec_train.main", "tests.recipes", "tests.train.killable_run"]
OUTSIDE = ("TORCHELASTIC", "WORLD", "RANK")


def environment(**extra: str) -> dict[str, str]:
    """Of a process that is started here: this one's, less what a launcher has set, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OUTSIDE)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


@cache
def fork_server() -> BaseContext:
    """Where processes are made; the first call waits until it has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    with pytest.MonkeyPatch.context() as patch:  # the server's environment, which its children inherit
        for key, value in environment().items():
            patch.setenv(key, value)
        process = context.Process(target=print)
        process.start()
        process.join()
    return context


class Training:
    """`python train.py arguments`, with methods of subprocess.Popen. What it prints goes to `output`, which nobody has
    to read for it to go on.
    """

    def __init__(self, output: Path, *arguments: object) -> None:
        self.output = output
        words = [str(argument) for argument in arguments]
        self._process = fork_server().Process(target=_train, args=(str(output), words, environment()), daemon=True)
        output.touch()
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status; minus a signal that has ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("train.py", timeout, self.output.read_bytes())
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """To the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """(what it printed, nothing) once it has ended."""
        self.wait(timeout)
        return self.output.read_text(), ""


def redirect(output: str | Path) -> None:
    """Send to a file what this process prints, its C++ included."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)


def _train(output: str, arguments: list[str], values: Mapping[str, str]) -> None:
    """Entry of the process."""
    from lowprec_train.main import main

    os.environ.clear()
    os.environ.update(values)
    redirect(output)
    sys.argv = ["train.py", *arguments]
    main()
