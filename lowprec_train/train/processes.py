"""Run several processes of one run on this machine: one output stream, one message if the run fails.

`lowprec train` starts them as torchrun does (RANK, WORLD_SIZE, LOCAL_RANK, a rendezvous store), but:

- Only rank 0 writes to the terminal. The output of the other ranks is stored and shown if it explains a failure.
- If a process fails, the others are ended at once, and one message has the rank and the cause.
- Each process has its own session, so Ctrl-C in a terminal reaches only the parent, which forwards every signal once
  to each rank. There is no deadline for saving.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore

from lowprec_train.train import signals
from lowprec_train.train.diagnostics import failure

HOST = "127.0.0.1"
POLL = 0.05  # seconds
PATIENCE = 10  # seconds for processes to end by themselves: rank 0 after another's failure, all after an abort
SETTLING = 1  # seconds for rank 0 to report the same error as another rank
SHOWN = 4  # last lines of a process's output that are shown
RANK_PREFIX = re.compile(r"^error on rank \d+:", flags=re.MULTILINE)


@dataclass
class Rank:
    """A process of the run. folder: its directory for output and error report."""

    number: int
    process: subprocess.Popen[Any]
    folder: Path

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs; negative: the number of the signal that ended it."""
        return self.process.poll()

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    def report(self) -> str | None:
        """Return its error report; None without one."""
        return failure.reported(str(self.folder / "error.json"))

    def reported_at(self) -> float:
        """Return the time of its report in seconds; infinity without one."""
        path = self.folder / "error.json"
        return path.stat().st_mtime if path.exists() else float("inf")

    def printed(self) -> list[str]:
        """Return the last lines of its output; none for rank 0, which writes to the terminal."""
        path = self.folder / "output"
        return path.read_text(errors="replace").splitlines()[-SHOWN:] if path.exists() else []


def launch(count: int, arguments: Sequence[str]) -> int:
    """Train with `count` processes. arguments: of the training command line.

    Returns the exit status: 0 if all succeeded, else 1, with the reason on stderr.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="lowprec-") as folder, signals.blocked():
        ranks = [_start(number, count, store.port, arguments, Path(folder)) for number in range(count)]
        try:
            with _forwarded_signals(ranks) as interrupts:
                return _wait(ranks, interrupts)
        finally:
            _kill(ranks)


def _start(number: int, count: int, port: int, arguments: Sequence[str], folder: Path) -> Rank:
    directory = folder / str(number)
    directory.mkdir()
    environment = {
        "OMP_NUM_THREADS": "1",  # torchrun's default
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(directory / "error.json"),
        "LOWPREC_LAUNCHER": str(os.getpid()),
    }
    command = [sys.executable, "-P", "-m", "lowprec_train.tools.cli", "train", *arguments]
    start = partial(subprocess.Popen, command, env=environment, start_new_session=True)
    if number == 0:
        return Rank(0, start(), directory)
    with (directory / "output").open("wb") as output:
        return Rank(number, start(stdout=output, stderr=subprocess.STDOUT), directory)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return (named or list(map(str, range(torch.cuda.device_count()))))[: torch.cuda.device_count()]


def background(
    module: str, arguments: Sequence[str], output: Path, *, values: Mapping[str, str], defaults: Mapping[str, str]
) -> subprocess.Popen[Any]:
    """Start a module of the package as a process with its own session, which ends when this process ends.

    output: file to which its stdout and stderr are appended. values: environment variables to set; defaults: those to
    set only if this process does not have them.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**defaults, **os.environ, "LOWPREC_LAUNCHER": str(os.getpid()), **values}
    with output.open("ab") as file:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=file, stderr=file)


@contextmanager
def _forwarded_signals(ranks: Sequence[Rank]) -> Iterator[list[float]]:
    """Forward signals to all ranks; yield the times of interrupts. Signals are blocked until here, and in each rank
    until `listen`.
    """
    interrupts: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(time.monotonic())
        for rank in ranks:
            rank.process.send_signal(number)

    with signals.handled(forward):
        yield interrupts


def _wait(ranks: Sequence[Rank], interrupts: Sequence[float]) -> int:
    """Wait until all ranks have ended, one has failed, or two interrupts came. Return the exit status."""
    while any(rank.status is None for rank in ranks) and not any(rank.failed for rank in ranks):
        if len(interrupts) > 1:
            break
        time.sleep(POLL)
    if all(rank.status == 0 for rank in ranks):
        return 0
    if len(interrupts) > 1:
        return _aborted(ranks, interrupts)
    lost = [rank for rank in ranks if rank.failed]
    if all((rank.status or 0) > 0 for rank in lost):  # an error that all ranks may have, and that rank 0 reports
        silent = all(rank.report() is None for rank in lost)  # an error of Hydra: rank 0 writes it to the terminal
        _ended(ranks[:1], time.monotonic() + (PATIENCE if silent else SETTLING))
    text = cause(ranks)
    _kill(ranks)
    if text:
        print(text, file=sys.stderr)
    return 1


def _aborted(ranks: Sequence[Rank], interrupts: Sequence[float]) -> int:
    """Handle a second interrupt: print rank 0's report. A third interrupt ends the wait."""
    deadline = interrupts[1] + PATIENCE
    while len(interrupts) < 3 and time.monotonic() < deadline and not _ended(ranks, time.monotonic() + POLL):
        pass
    _kill(ranks)
    print(ranks[0].report() or "aborted by a second interrupt; the last checkpoint is intact", file=sys.stderr)
    return 1


def _ended(ranks: Sequence[Rank], deadline: float) -> bool:
    """Wait for these ranks until the deadline; return whether they have ended."""
    while any(rank.status is None for rank in ranks):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def _kill(ranks: Sequence[Rank]) -> None:
    """Kill the ranks that still run, with their children."""
    for rank in ranks:
        if rank.status is None:
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def cause(ranks: Sequence[Rank]) -> str:
    """Return the first cause of a failure: the earliest report, also of a rank that still runs, else a signal.

    A rank that loses another rank fails too, but reports it seconds later, or ends with SIGABRT in C++.
    """
    lost = [rank for rank in ranks if rank.failed]
    first = min(ranks, key=Rank.reported_at)
    if text := first.report():
        shared = RANK_PREFIX.sub("error:", text)
        others = [RANK_PREFIX.sub("error:", rank.report() or "") for rank in ranks if rank is not first]
        return shared if shared in others else text
    killed = sorted((rank for rank in lost if (rank.status or 0) < 0), key=lambda rank: rank.status == -signal.SIGABRT)
    if killed:
        return _killed(killed[0])
    if any(rank.number == 0 for rank in lost):
        return ""
    return "\n".join([f"error: rank {lost[0].number} ended with status {lost[0].status}", *lost[0].printed()])


def _killed(rank: Rank) -> str:
    name = signal.Signals(-(rank.status or 0)).name
    hint = ", which the kernel sends when memory runs out" if name == "SIGKILL" else ""
    text = f"error: rank {rank.number} was ended by {name}{hint}; the same command continues from the last checkpoint"
    return "\n".join([text, *(rank.printed() if name == "SIGABRT" else [])])
