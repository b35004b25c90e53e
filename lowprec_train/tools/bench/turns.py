"""A contestant that is built, warm, and takes a step when it is its turn: in this process, or in one of its own.

Libraries that cannot be loaded side by side are compared by `Apart`: the contestant lives in a child process, is asked
for one step at a time through a pipe, and times it there with its own clock, as `Here` does. Nobody else steps
meanwhile, so contestants of several processes take turns as those of one do.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from lowprec_train.tools.bench import profile
from lowprec_train.tools.bench.contestant import Entrant, Work
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Interval

END_S = 60.0  # that a child may take to leave


class ChildError(RuntimeError):
    """What a child process said of its error, in one line."""


class Turns(Protocol):
    """facts: what it took to get ready, for the contestant's row."""

    facts: dict[str, Any]

    def turn(self) -> tuple[float, int]:
        """One step: (milliseconds, how often it went to the device for memory)."""
        ...

    def profile(self) -> dict[str, Any]:
        """Device time of two steps (`bench.profile`)."""
        ...

    def close(self) -> None:
        """Leave the device."""
        ...


Ready = Callable[[Entrant, Work, int], Turns]  # a contestant that has been built and warmed up by so many steps


class Here:
    """In this process. Building warms up, and tells its first and last loss and its own memory."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        on_gpu = work.device.type == "cuda"
        before = torch.cuda.memory_allocated(work.device) if on_gpu else 0
        self._device, self._step = work.device, contestant.stepper(work)
        losses = [self._step() for _ in range(max(1, warm_up))]
        self.facts: dict[str, Any] = {"loss": [float(losses[0]), float(losses[-1])]}
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(work.device)
            self._step()
            torch.cuda.synchronize()
            self.facts["peak_gib"] = (torch.cuda.max_memory_allocated(work.device) - before) / 2**30
            self.facts["resident_gib"] = (torch.cuda.memory_allocated(work.device) - before) / 2**30
            self.facts["attention"] = attention(self.profile())

    def turn(self) -> tuple[float, int]:
        allocated = self._allocations()
        with Interval(self._device) as interval:
            self._step()
        return interval.ms, self._allocations() - allocated

    def profile(self) -> dict[str, Any]:
        return profile.profile(self._step, self._device)

    def close(self) -> None:
        """Nothing: the models go with their last reference."""

    def _allocations(self) -> int:
        """The allocator goes to the device, which is slow, when blocks that one model left do not fit the next one."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_device_alloc", 0))


class Apart:
    """In a child process. Raises ChildError with the child's error, or with its exit code where it died."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (
            theirs,
            contestant,
            replace(work),
            warm_up,
        )  # replaced: without what this process has cached on a device
        self._process = context.Process(target=serve, args=given, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self._answer() | {"apart": True}
        except ChildError:
            self.close()
            raise

    def turn(self) -> tuple[float, int]:
        ms, allocations = self._ask("turn")
        return ms, allocations

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
    """The child: gets ready, then answers until the parent closes the pipe, or is gone. Answers are (error, value)."""
    with suppress(EOFError, OSError):
        here: Turns | None = None
        asked = "facts"
        while True:
            try:
                here = here or Here(contestant, work, warm_up)
                value, error = here.facts if asked == "facts" else getattr(here, asked)(), ""
            except Exception as caught:
                traceback.print_exc(file=sys.stderr)
                value, error = None, cause(caught)
            pipe.send((error, value))
            asked = pipe.recv()


def ready(contestant: Entrant, work: Work, warm_up: int) -> Turns:
    """In the process that it asks for."""
    return (Apart if contestant.apart else Here)(contestant, work, warm_up)


def told(error: Exception) -> str:
    """One line for a row, wherever the error was."""
    return str(error) if isinstance(error, ChildError) else cause(error)


def attention(profiled: dict[str, Any]) -> str:
    """The attention kernel that took longest, which names its library; empty where none is among the longest."""
    return next((each["kernel"] for each in profiled["longest"] if each["class"] == "attention"), "")
