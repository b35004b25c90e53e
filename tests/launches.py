"""Processes of tests, forked from a server that has imported torch and the package once: a start costs no import."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOADED = [
    "torch.distributed.fsdp",
    "lowprec_train.main",
    "lowprec_train.model.joint_graph",
    "lowprec_train.tools.cli",
    "tests.recipes",
    "tests.train.killable_run",
    "tests.frozen",
]
WORDS = (
    "loss",
    "scale",
    "tile",
    "token",
    "block",
    "codes",
    "draws",
    "layer",
    "model",
    "train",
    "valid",
    "epoch",
    "batch",
)
OUTSIDE = ("TORCHELASTIC", "WORLD", "RANK")


def environment(**extra: str) -> dict[str, str]:
    """Of a process that is started here: this one's, less what a launcher has set, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OUTSIDE)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def write_modules(directory: Path) -> None:
    """A corpus: 40 small modules of Python, whose words are learned in a few steps."""
    directory.mkdir(exist_ok=True)
    for number in range(40):
        lines = (f"def {WORDS[i * number % len(WORDS)]}_{i}(x): return x * {i * 7 + number}" for i in range(40))
        (directory / f"module_{number}.py").write_text("\n".join(lines))


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


class Command:
    """`train.py arguments` or `lowprec arguments`, with methods of subprocess.Popen. What it prints goes to files,
    which nobody has to read for it to go on: to `output`, or its errors to `errors`.
    """

    def __init__(
        self, program: str, *arguments: object, output: Path, errors: Path | None = None, **place: Any
    ) -> None:
        """place: `directory` to run in and `values` of the environment, where they are not those of this process."""
        self.output, words = output, [str(argument) for argument in arguments]
        how = {"output": output, "errors": errors, "directory": Path.cwd(), "values": environment(), **place}
        self._process = fork_server().Process(target=_enter, args=(program, words), kwargs=how)
        output.touch()
        self._process.start()
        atexit.register(self._process.kill)  # a command that never ends must not outlive the tests
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit status; minus a signal that has ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, self.output.read_bytes())
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


def training(output: Path, *arguments: object) -> Command:
    """`python train.py arguments`, all that it prints in `output`."""
    return Command("train", *arguments, output=output)


def redirect(output: Path, errors: Path | None = None) -> None:
    """Send to files what this process prints, its C++ included; to one of them where one is given."""
    output.write_text("")
    sys.stdout, sys.stderr = _redirected(1, output), _redirected(2, errors or output)


def _redirected(standard: int, file: Path) -> io.TextIOWrapper:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, standard)
    os.close(descriptor)
    return io.TextIOWrapper(io.FileIO(standard, "w", closefd=False), line_buffering=True)


def _enter(
    program: str, arguments: list[str], *, output: Path, errors: Path | None, directory: Path, values: dict[str, str]
) -> None:
    """Entry of the process. The imports are the server's."""
    from lowprec_train import main
    from lowprec_train.tools import cli

    os.environ.clear()
    os.environ.update(values)
    os.chdir(directory)
    redirect(output, errors)
    if program == "train":
        sys.argv = ["train.py", *arguments]
        main.main()
    sys.argv = ["lowprec", *arguments]
    sys.exit(cli.main(arguments))
