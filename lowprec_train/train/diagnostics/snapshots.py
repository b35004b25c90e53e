"""Snapshots of GPU memory: every block that torch has allocated, with its stack if that was recorded.

    touch runs/NAME/SNAPSHOT            memory/step-12.rank-0.pickle, before the next step
    a step that runs out of memory      memory/oom-step-12.rank-0.pickle

https://docs.pytorch.org/memory_viz draws them. A file requests a snapshot, not a signal: a file needs no process id and
no login to the node, and all signals that reach a rank under torchrun and Slurm mean "stop". With `allocations` > 0,
blocks have a Python stack and the snapshot has a history of events, which costs a few microseconds per allocation.

torch has only private functions for recording and saving, which this module wraps (decision 0008).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowprec_train.train.diagnostics.out_of_memory import is_out_of_memory, of_host

log = logging.getLogger(__name__)

REQUEST = "SNAPSHOT"


@contextmanager
def recorded_history(allocations: int) -> Iterator[None]:
    """Record the last `allocations` allocations and releases with their Python stacks; 0: none."""
    if allocations:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=allocations)
    try:
        yield
    finally:
        if allocations:
            torch.cuda.memory._record_memory_history(None)


def save(path: Path) -> None:
    """Write a snapshot of this process's GPU memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


class Snapshots:
    """Snapshots of one process of a run.

    run: the run directory. on_request: whether this process handles requests. patience: seconds between two checks.
    """

    def __init__(
        self, run: Path, device: torch.device, *, rank: int = 0, on_request: bool = True, patience: float = 2.0
    ) -> None:
        self._run, self._device, self._rank, self._patience = run, device, rank, patience
        self._request, self._warned = run / REQUEST, False
        self._answered: int | None = None
        self._answered = self._newest() if on_request else None
        self._on_request, self._next, self._step = on_request, time.monotonic() + patience, 0

    def begin_step(self, step: int) -> None:
        """Call before every step, counted from 1. Answers a request that is newer than the last one."""
        self._step = step
        if not self._on_request or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._patience
        newest = self._newest()
        if newest != self._answered and newest is not None:
            self._answer()
        self._answered = newest

    @contextmanager
    def of_failures(self) -> Iterator[None]:
        """Write a snapshot if a step runs out of memory; add the step and the path to the error."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(f"in step {self._step}")
                if self._device.type == "cuda" and not of_host(error):
                    error.add_note(self._saved("oom-")[1])
            raise

    def _answer(self) -> None:
        if self._device.type == "cuda":
            written, message = self._saved()
            log.log(logging.INFO if written else logging.WARNING, "%s", message)
        else:
            log.warning("%s: snapshots are of GPU memory, and this run is on %s", self._request, self._device.type)

    def _saved(self, prefix: str = "") -> tuple[bool, str]:
        """Try to write a snapshot; return whether it was written, and a message. A failure must neither end a healthy
        run nor replace an out-of-memory error.
        """
        path = self._run / "memory" / f"{prefix}step-{self._step}.rank-{self._rank}.pickle"
        try:
            save(path)
        except (OSError, RuntimeError, MemoryError) as error:
            return False, f"no memory snapshot: {str(error) or type(error).__name__}"
        return True, f"memory snapshot: {path}"

    def _newest(self) -> int | None:
        """Return the time of the request in nanoseconds; None without one. A file system error, as on NFS, is not a new
        request.
        """
        try:
            return self._request.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self._warned:
                log.warning("%s: cannot check for this file (%s)", self._request, error.strerror)
            self._warned = True
            return self._answered
