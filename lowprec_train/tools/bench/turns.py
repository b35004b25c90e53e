"""Run the steps of a contestant one at a time, in this process (`InProcess`) or in a child process (`InChildProcess`).

`InChildProcess` is for libraries that cannot be loaded in one process. The parent requests one step at a time through a
pipe; the child runs and times the step as `InProcess` does. Only one contestant runs at any time.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from lowprec_train.tools.bench import profile
from lowprec_train.tools.bench.contestant import Entrant, Work
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Interval
from lowprec_train.train import cuda_graph

END_S = 60.0  # timeout for the exit of a child process


class ChildError(RuntimeError):
    """An error in a child process, in one line."""


class Turn(NamedTuple):
    """One step. allocations: of device memory (cudaMalloc). host_ms, cpu_ms: of each process, until the step is
    launched, and the CPU time of all its threads until then.
    """

    ms: float
    allocations: int
    host_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]


class Turns(Protocol):
    """A contestant that is built and warmed up. facts: losses and memory of the warm-up, for its row."""

    facts: dict[str, Any]

    def turn(self) -> Turn:
        """Run one step."""
        ...

    def profile(self) -> dict[str, Any]:
        """Device time of two steps (`bench.profile`)."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


Ready = Callable[[Entrant, Work, int], Turns]  # (contestant, work, warm-up steps) -> contestant ready to run


class InProcess:
    """A contestant in this process. The constructor warms it up and records its first and last loss and its memory."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        on_gpu = work.device.type == "cuda"
        before = torch.cuda.memory_allocated(work.device) if on_gpu else 0
        self._device, self._step = work.device, contestant.stepper(work)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(work.device)
        losses = [self._step() for _ in range(max(1, warm_up) + contestant.recorded * cuda_graph.WARM_UP)]
        self.facts: dict[str, Any] = {"loss": [float(losses[0]), float(losses[-1])]}
        if on_gpu:
            if not contestant.recorded:
                torch.cuda.reset_peak_memory_stats(work.device)
            self._step()
            torch.cuda.synchronize()
            self.facts["peak_gib"] = (torch.cuda.max_memory_allocated(work.device) - before) / 2**30
            self.facts["resident_gib"] = (torch.cuda.memory_allocated(work.device) - before) / 2**30
            if not contestant.recorded:  # CUPTI, which profiles, and graphs disturb each other
                self.facts["attention"] = attention(self.profile())

    def turn(self) -> Turn:
        allocated = self._allocations()
        begin, cpu = time.perf_counter(), time.process_time()
        with Interval(self._device) as interval:
            self._step()
        host_ms, cpu_ms = (time.perf_counter() - begin) * 1e3, (time.process_time() - cpu) * 1e3
        return Turn(interval.ms, self._allocations() - allocated, (host_ms,), (cpu_ms,))

    def profile(self) -> dict[str, Any]:
        return profile.profile(self._step, self._device)

    def close(self) -> None:
        """Do nothing: the model is freed with its last reference."""

    def _allocations(self) -> int:
        """Number of device allocations so far. They are slow, and occur if cached blocks do not fit the next model."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_device_alloc", 0))


class InChildProcess:
    """A contestant in a child process. Raises ChildError with the child's error, or with its exit code if it died."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, contestant, replace(work), warm_up)  # `replace` drops tensors cached on a device
        self._process = context.Process(target=serve, args=given, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self._answer() | {"apart": True}
        except ChildError:
            self.close()
            raise

    def turn(self) -> Turn:
        return Turn(*self._ask("turn"))

    def profile(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("profile")
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
        except OSError:
            raise ChildError(self._ended()) from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            error, value = self._pipe.recv()
        except (EOFError, OSError):
            raise ChildError(self._ended()) from None
        if error:
            raise ChildError(error)
        return value

    def _ended(self) -> str:
        self._process.join(END_S)
        return f"its process ended with exit code {self._process.exitcode}"


def serve(pipe: Connection, contestant: Entrant, work: Work, warm_up: int) -> None:
    """The child's loop: build the contestant, then answer requests with (error, value) until the pipe is closed."""
    with suppress(EOFError, OSError):
        here: Turns | None = None
        request = "facts"
        while True:
            try:
                here = here or InProcess(contestant, work, warm_up)
                value, error = here.facts if request == "facts" else getattr(here, request)(), ""
            except Exception as caught:
                traceback.print_exc(file=sys.stderr)
                value, error = None, cause(caught)
            pipe.send((error, value))
            request = pipe.recv()


def ready(contestant: Entrant, work: Work, warm_up: int) -> Turns:
    """Build and warm up a contestant, in a child process if it is `apart`."""
    return (InChildProcess if contestant.apart else InProcess)(contestant, work, warm_up)


def error_line(error: Exception) -> str:
    """An error of this process or of a child process in one line, for a table row."""
    return str(error) if isinstance(error, ChildError) else cause(error)


def attention(profiled: dict[str, Any]) -> str:
    """Name of the slowest attention kernel, which identifies its library; "" if none is among the longest kernels."""
    return next((each["kernel"] for each in profiled["longest"] if each["class"] == "attention"), "")
