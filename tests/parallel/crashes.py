"""One of two ranks that save together dies, or finds its disk full, at a chosen stage: entry points for processes.

The first checkpoint, of step 1, is written undisturbed. Every tensor of step n is n; a matrix of five rows is cut over
the ranks, a vector is on both.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lowprec_train.parallel.mesh import Mesh, Sizes
from lowprec_train.parallel.placement import Placed, Placements
from lowprec_train.train.checkpoint import Checkpointer, CheckpointError, ModelState, Writer
from lowprec_train.train.stop_consensus import StopConsensus
from tests.train.damage import invert
from tests.train.killable_run import file_size
from tests.train.standins import make_trainer

RANKS = 2
PLACED = {
    "weight": Placed(shape=(5, 4096), tp=None, sharded=True),
    "bias": Placed(shape=(5,), tp=None, sharded=False),
}
STAGES = {
    "before writing": (1, 1),
    "while writing": (1, 1),
    "before the metadata": (0, 1),
    "before publishing": (0, 1),
    "before latest": (0, 1),
    "before pruning": (0, 2),
}
"""Stage of the save of step 2 -> the rank that is killed there, and the step that `latest` names then."""


class State:
    """A model whose tensors all hold the number of the step, and that number."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.step = mesh, 0
        rows = (3, 2)[mesh.rank]
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.zeros(rows, 4096))
        self.model.bias = nn.Parameter(torch.zeros(5))

    @property
    def parts(self) -> dict:
        return {"model": ModelState(self.model, Placements(self.mesh, PLACED)), "state": self}

    @torch.no_grad()
    def advance(self, step: int) -> State:
        self.step = step
        for parameter in self.model.parameters():
            parameter.fill_(step)
        return self

    def is_of(self, step: int) -> bool:
        tensors = [*self.model.parameters()]
        return self.step == step and all(bool((tensor == step).all()) for tensor in tensors)

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


class Struck(Checkpointer):
    """At a stage of the save of step 2 something happens to one rank."""

    stage, rank = "", -1

    def _at(self, stage: str, step: int) -> bool:
        return (self.stage, self.rank, 2) == (stage, dist.get_rank(), step)

    def _write(self, flat: dict, step: int) -> None:
        if self._at("before writing", step):
            die()
        writing = self._at("while writing", step)
        limit = 300 if self._at("full disk", step) else 0
        with (
            patched(os, "fsync", die if writing else os.fsync),
            patched(Writer, "finish", die if self._at("before the metadata", step) else Writer.finish),
            file_size(limit),
        ):
            super()._write(flat, step)

    def _publish(self, partial: Path, step: int) -> None:
        if self._at("before publishing", step):
            die()
        with (
            patched(os, "replace", die if self._at("before latest", step) else os.replace),
            patched(os, "fsync", no_space if self._at("full disk at last", step) else os.fsync),
        ):
            super()._publish(partial, step)

    def _prune(self, newest: int) -> None:
        if self._at("before pruning", newest):
            die()
        super()._prune(newest)


class Slow(Checkpointer):
    """Takes a second to begin."""

    def _write(self, flat: dict, step: int) -> None:
        time.sleep(1.0)
        super()._write(flat, step)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def patched(owner: object, name: str, value: Callable) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def join(rank: int, directory: Path, launch: str) -> tuple[Mesh, dist.ProcessGroup]:
    store = f"file://{directory}/store-{launch}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    return Mesh(Sizes(dp_shard=RANKS), "cpu"), dist.new_group(backend="gloo")


def struck(rank: int, directory: Path, stage: str, target: int, asynchronous: bool) -> dict[str, object]:
    """Save steps 1, 2 and 3, the second of which something happens to; what this rank makes of it."""
    mesh, group = join(rank, directory, "struck")
    state = State(mesh)
    saver = Struck(directory / "run", interval=1, keep=1, asynchronous=asynchronous, process_group=group)
    saver.save(state.advance(1).parts, 1, wait=True)
    saver.stage, saver.rank = stage, target
    begin, seen = time.monotonic(), {"error": ""}
    try:
        saver.save(state.advance(2).parts, 2)
        while asynchronous and not saver.failed:
            saver.check()  # says nothing where ranks could leave each other alone
            time.sleep(0.01)
        saver.finish()
    except CheckpointError as error:
        seen["error"] = str(error)
    seen |= {"seconds": time.monotonic() - begin, "latest": saver.latest()}
    if "disk" in stage:
        saver.save(state.advance(3).parts, 3, wait=True)
        seen["after"] = saver.latest()
    return seen


def beside(rank: int, directory: Path) -> dict[str, object]:
    """A save that takes its time, while the tensors change and the training step's own collectives go on."""
    mesh, group = join(rank, directory, "beside")
    state = State(mesh)
    saver = Slow(directory / "run", interval=1, keep=1, process_group=group)
    begin = time.monotonic()
    saver.save(state.advance(1).parts, 1)
    total = torch.tensor(rank + 1.0)
    for _ in range(20):
        dist.all_reduce(total)
    state.advance(9)
    stall, written = time.monotonic() - begin, saver.latest()
    saver.finish()
    read = State(mesh)
    seen = {"stall": stall, "written": written, "total": float(total), "found": saver.load(read.parts)}
    return seen | {"correct": read.is_of(1)}


def fitting(rank: int, directory: Path) -> dict[str, object]:
    """A run whose save of step 2 fails on rank 1 in the background; no other is due before step 1000."""
    _, group = join(rank, directory, "fitting")
    trainer = make_trainer(steps=1000, eval_interval=1000)
    saver = Struck(directory / "run", interval=2, keep=1, process_group=group)
    saver.stage, saver.rank, seen = "full disk", 1, {"error": ""}
    saver.due = (2).__eq__
    consensus = StopConsensus(dist.new_group(backend="gloo"))
    try:
        trainer.fit(sinks=[], checkpointer=saver, consensus=consensus)
    except CheckpointError as error:
        seen["error"] = str(error)
    return seen | {"steps": trainer.steps_done}


def resumed(rank: int, directory: Path, step: int) -> dict[str, object]:
    """A fresh launch after a crash: loads, goes on, and saves again."""
    mesh, group = join(rank, directory, "resumed")
    state = State(mesh)
    saver = Checkpointer(directory / "run", interval=1, keep=1, process_group=group)
    left = sorted(path.name for path in (directory / "run").glob(".tmp*"))
    found = saver.load(state.parts)
    correct = state.is_of(step)
    saver.save(state.advance(2).parts, 2, wait=True)
    read = State(mesh)
    return {"left": left, "found": found, "correct": correct, "again": (saver.load(read.parts), read.is_of(2))}


def damaged(rank: int, directory: Path) -> dict[str, object]:
    """Two ranks load while bytes of what either wrote are inverted, and while both checkpoints are damaged."""
    mesh, group = join(rank, directory, "damaged")
    state, seen = State(mesh), {}
    for owner in range(RANKS):
        saver = Checkpointer(directory / f"of-{owner}", interval=1, keep=2, process_group=group)
        for step in (1, 2):
            saver.save(state.advance(step).parts, step, wait=True)
        if rank == 0:
            invert(directory / f"of-{owner}" / "step-2" / f"__{owner}_0.distcp", count=1)
        dist.barrier()
        seen[f"found {owner}"] = saver.load(state.parts), state.is_of(1), saver.steps()
    if rank == 0:
        invert(directory / "of-0" / "step-1" / "__1_0.distcp", count=1)
    dist.barrier()
    try:
        Checkpointer(directory / "of-0", interval=1, keep=2, process_group=group).load(state.parts)
    except CheckpointError as error:
        seen["error"] = str(error)
    return seen
