"""Several processes of one run on this machine: one stream of output, one message when it fails.

`lowprec train` starts them as torchrun would (RANK, WORLD_SIZE, LOCAL_RANK, a store to meet at), but:

- Only rank 0 writes to the terminal. What the others print is kept, and shown where it explains a failure.
- A process that ends badly ends the others at once, and one message says which one it was and why.
- Each has a session of its own. A terminal's Ctrl-C therefore reaches this process alone, which passes every signal on
  once to each, however it came. There is no deadline for saving.
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
PATIENCE = 10  # seconds in which processes end by themselves: rank 0 after another's failure, all after an abort
SETTLING = 1  # seconds in which rank 0 says the same as another that failed before it
SHOWN = 4  # last lines of what a process printed
PLACE = re.compile(r"^error on rank \d+:", flags=re.MULTILINE)


@dataclass
class Rank:
    """A process of the run. folder: of its own, for what it prints and reports."""

    number: int
    process: subprocess.Popen[Any]
    folder: Path

    @property
    def status(self) -> int | None:
        """None: it runs. Negative: the number of the signal that ended it."""
        return self.process.poll()

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    def report(self) -> str | None:
        """What it said of its failure."""
        return failure.reported(str(self.folder / "error.json"))

    def reported_at(self) -> float:
        """Time of its report in seconds; infinite without one."""
        path = self.folder / "error.json"
        return path.stat().st_mtime if path.exists() else float("inf")

    def printed(self) -> list[str]:
        """Its last lines, which the terminal has not seen; none for rank 0, whose lines it has."""
        path = self.folder / "output"
        return path.read_text(errors="replace").splitlines()[-SHOWN:] if path.exists() else []


def launch(count: int, arguments: Sequence[str]) -> int:
    """Train with `count` processes. arguments: of the training command line.

    Returns the exit status: 0 when all ended well, else 1, with the reason on stderr.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="lowprec-") as folder, signals.blocked():
        ranks = [_start(number, count, store.port, arguments, Path(folder)) for number in range(count)]
        try:
            with _passed_on(ranks) as interrupts:
                return _wait(ranks, interrupts)
        finally:
            _kill(ranks)


def _start(number: int, count: int, port: int, arguments: Sequence[str], folder: Path) -> Rank:
    own = folder / str(number)
    own.mkdir()
    environment = {
        "OMP_NUM_THREADS": "1",  # as under torchrun, unless it is set
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
        "LOWPREC_LAUNCHER": str(os.getpid()),
    }
    command = [sys.executable, "-P", "-m", "lowprec_train.tools.cli", "train", *arguments]
    start = partial(subprocess.Popen, command, env=environment, start_new_session=True)
    if number == 0:
        return Rank(0, start(), own)
    with (own / "output").open("wb") as output:
        return Rank(number, start(stdout=output, stderr=subprocess.STDOUT), own)


def visible_gpus() -> list[str]:
    """The GPUs that torch sees here, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return (named or list(map(str, range(torch.cuda.device_count()))))[: torch.cuda.device_count()]


def background(
    module: str, arguments: Sequence[str], output: Path, *, values: Mapping[str, str], defaults: Mapping[str, str]
) -> subprocess.Popen[Any]:
    """A module of the package as a process of a session of its own, which ends when this one has ended.

    output: file to which all is appended that it prints. values: of its environment, beside those of this process;
    defaults: where this one has none.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**defaults, **os.environ, "LOWPREC_LAUNCHER": str(os.getpid()), **values}
    with output.open("ab") as file:
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=file, stderr=file)


@contextmanager
def _passed_on(ranks: Sequence[Rank]) -> Iterator[list[float]]:
    """Hand signals on to all processes; yields the times of interrupts. They wait until here, and there: `listen`."""
    interrupts: list[float] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(time.monotonic())
        for rank in ranks:
            rank.process.send_signal(number)

    with signals.handled(hand_on):
        yield interrupts


def _wait(ranks: Sequence[Rank], interrupts: Sequence[float]) -> int:
    """Until all have ended, or one has failed, or they were interrupted twice."""
    while any(rank.status is None for rank in ranks) and not any(rank.failed for rank in ranks):
        if len(interrupts) > 1:
            break
        time.sleep(POLL)
    if all(rank.status == 0 for rank in ranks):
        return 0
    if len(interrupts) > 1:
        return _aborted(ranks, interrupts)
    lost = [rank for rank in ranks if rank.failed]
    if all((rank.status or 0) > 0 for rank in lost):  # a mistake that all may find, and rank 0 is to tell
        silent = all(rank.report() is None for rank in lost)  # Hydra's error: rank 0 writes it to the terminal
        _ended(ranks[:1], time.monotonic() + (PATIENCE if silent else SETTLING))
    text = cause(ranks)
    _kill(ranks)
    if text:
        print(text, file=sys.stderr)
    return 1


def _aborted(ranks: Sequence[Rank], interrupts: Sequence[float]) -> int:
    """After a second interrupt: what rank 0 says of it. A third one waits no longer."""
    deadline = interrupts[1] + PATIENCE
    while len(interrupts) < 3 and time.monotonic() < deadline and not _ended(ranks, time.monotonic() + POLL):
        pass
    _kill(ranks)
    print(ranks[0].report() or "aborted by a second interrupt; the last checkpoint stands", file=sys.stderr)
    return 1


def _ended(ranks: Sequence[Rank], deadline: float) -> bool:
    """Wait for all of these until then; whether they have ended."""
    while any(rank.status is None for rank in ranks):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def _kill(ranks: Sequence[Rank]) -> None:
    """End what still runs, children included."""
    for rank in ranks:
        if rank.status is None:
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def cause(ranks: Sequence[Rank]) -> str:
    """The first cause: the earliest report, of ranks that still run too, else a signal.

    A process that loses another one fails as well, but takes seconds to report it, and in C++ ends by SIGABRT.
    """
    lost = [rank for rank in ranks if rank.failed]
    first = min(ranks, key=Rank.reported_at)
    if text := first.report():
        shared = PLACE.sub("error:", text)
        others = [PLACE.sub("error:", rank.report() or "") for rank in ranks if rank is not first]
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
