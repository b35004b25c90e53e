"""Checkpoints that a crash, a signal or a full disk cannot spoil.

    stage     copy the state to host memory; training goes on from here
    write     torch.distributed.checkpoint into checkpoints/.tmp-step-N and a manifest of file sizes, synced to disk
    publish   rename to checkpoints/step-N, then write-and-rename `latest`

`latest` names the newest complete checkpoint and is the last thing to change, so whenever a process dies the run
resumes from a complete one. Loading reads the metadata first: a checkpoint of another model is refused, with the
keys, before a byte of the model is touched; then DCP fills the live tensors in place, which needs no second copy of
the state and casts nothing.

Of many processes each writes and reads its own parts, and rank 0 alone decides: it clears what a crash has left,
publishes once all have written and synced, prunes, and says at a load which checkpoint it is. A save that fails on one
fails on all, with the same words.

A checkpoint is a mapping of parts, each a `Stateful` whose state_dict is flat: `model.<fqn>`,
`optimizer.<fqn>.exp_avg`, `trainer.step`. Hyper-parameters are not in it: they come from the configuration.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from lowprec_train.train.launch import first
from lowprec_train.train.states import ModelState, OptimizerState

__all__ = ["CheckpointError", "Checkpointer", "ModelState", "OptimizerState"]

Parts = Mapping[str, Stateful]

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says where, why, and which checkpoint is intact."""


class _Writer(dcp.FileSystemWriter):
    """Raises the cause of a failed write, not what torch has made of it: to the other processes an exception travels
    without those that it came from.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _root(error) from None


class _Planner(DefaultSavePlanner):
    """Tensors that many processes hold are written by one of them; what is no tensor by rank 0, the only one that has
    sinks and so knows what they want remembered.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        return plan if self.is_coordinator else replace(plan, items=tensors)


class Checkpointer:
    """Saves and loads the checkpoints of one run. At most one save is in flight; its error surfaces at the next call.

    Where there are many processes, all of them make it and call `save`, `finish` and `load` in the same order.

    Args:
        directory: `<run>/checkpoints`; made if absent. What a crash left there half-written is removed.
        interval: `due(step)` every so many steps, >= 1.
        keep: newest checkpoints to keep, >= 1.
        asynchronous: write in a thread, from a staged copy.
        process_group: a gloo group of all ranks, used for nothing else: a save goes on beside the training step.

    Raises:
        ValueError: interval or keep below 1.
        CheckpointError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        interval: int,
        keep: int,
        asynchronous: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("interval", interval), ("keep", keep)):
            if value < 1:
                raise ValueError(f"checkpoint {name}={value} must be at least 1")
        self._directory = Path(directory)
        self._interval, self._keep, self._group = interval, keep, process_group
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._executor = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._save: Future[None] | None = None
        first(self._prepare, self._group)

    def due(self, step: int) -> bool:
        """Whether `step` is one to save at."""
        return step % self._interval == 0

    def save(self, state: Parts, step: int, wait: bool = False) -> None:
        """Save `state` as step-`step`. Without `wait` an asynchronous save goes on in the background.

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed. The checkpoint that `latest`
                names is intact.
        """
        self.finish()
        flat = _flatten(state)
        if self._executor is None:
            self._write(flat, step)
            return
        staged = self._stager.stage(flat)
        self._save = self._executor.submit(self._write, staged, step)
        if wait:
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether a background save has ended badly. The next `save` or `finish` raises its error."""
        return self._save is not None and self._save.done() and self._save.exception() is not None

    def check(self) -> None:
        """Raise the error of a background save that has ended badly; waits for nothing.

        Not where there are many processes: they learn of it at different moments, and one that raises leaves the others
        waiting for it. Let `failed` be a reason to stop together.
        """
        if self.failed and not dist.is_initialized():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight and raise its error."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def load(self, state: Parts, step: int | None = None, *, optional: Collection[str] = ()) -> int | None:
        """Fill `state` from the checkpoint that `latest` names, or from `step`; return its step, None if there is none.

        optional: parts that keep what they are where the checkpoint has nothing of them.

        Raises:
            ValueError: the checkpoint is of another model: names the keys, shapes and dtypes that differ. Nothing has
                been changed.
            CheckpointError: the checkpoint is incomplete or unreadable.
        """
        self.finish()
        step = first(lambda: self.latest() if step is None else step, self._group)
        if step is None:
            return None
        path, flat = self._path(step), _flatten(state)
        names = first(lambda: self._verify(path, flat, list(state), optional), self._group)
        flat = {key: value for key, value in flat.items() if key.split(".", 1)[0] in names}
        try:
            reader = dcp.FileSystemReader(path)
            dcp.load(flat, storage_reader=reader, process_group=self._group, no_dist=not dist.is_initialized())
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {_cause(error)}") from error
        for name in names:
            state[name].load_state_dict(
                {key.removeprefix(f"{name}."): v for key, v in flat.items() if key.startswith(f"{name}.")}
            )
        return step

    def latest(self) -> int | None:
        """Step that `latest` names; None when there is no such file.

        Raises:
            CheckpointError: the file holds something else.
        """
        return latest(self._directory)

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending."""
        return steps(self._directory)

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step}"

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for replaced in self._directory.glob(".tmp-old-step-*"):
                final = self._directory / replaced.name.removeprefix(".tmp-old-")
                if not final.exists():  # died between the two renames of a replacement
                    replaced.rename(final)
            for leftover in self._directory.glob(".tmp-*"):
                _remove(leftover)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {self._directory}: {error}") from error

    def _write(self, flat: dict[str, Any], step: int) -> None:
        partial = self._directory / f".tmp-step-{step}"
        try:
            dcp.save(
                flat,
                storage_writer=_Writer(partial, sync_files=True),
                planner=_Planner(),
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
            first(lambda: self._publish(partial, step), self._group)
        except (Exception, CheckpointException) as error:
            if _is_coordinator():
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._complaint(step, error)) from error

    def _publish(self, partial: Path, step: int) -> None:
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        _write_synced(partial / "manifest.json", json.dumps({"step": step, "files": sizes}))
        _sync_directory(partial)
        final = self._path(step)
        if final.exists():  # from before a resume at an earlier step
            self._retire(step)
        partial.rename(final)
        _sync_directory(self._directory)
        _write_synced(self._directory / ".tmp-latest", f"step-{step}\n")
        os.replace(self._directory / ".tmp-latest", self._directory / "latest")
        _sync_directory(self._directory)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        older = [step for step in self.steps() if step < newest]
        for step in older[: max(0, len(older) - (self._keep - 1))]:
            self._retire(step)
        for retired in self._directory.glob(".tmp-old-step-*"):
            _remove(retired)

    def _retire(self, step: int) -> None:
        """Out of sight in one rename: a removal that is cut short must not leave half a step-N."""
        self._path(step).rename(self._directory / f".tmp-old-step-{step}")

    def _complaint(self, step: int, error: BaseException) -> str:
        root = _root(error)
        full = isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        advice = "\nMake room or raise the limit, then start the run again: it resumes." if full else ""
        latest = self.latest()
        intact = f"{self._path(latest)} is intact" if latest is not None else "there is no earlier checkpoint"
        where = f"checkpoint of step {step} could not be written to {self._directory}"
        return f"{where}: {_cause(error)}; {intact}.{advice}"

    def _verify(self, path: Path, flat: Mapping[str, Any], names: list[str], optional: Collection[str]) -> list[str]:
        """Names of the parts to load. Raises where the checkpoint is incomplete, or another model's."""
        verify_files(path)
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
        except OSError as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error
        there = {key.split(".", 1)[0] for key in metadata.state_dict_metadata}
        names = [name for name in names if name in there or name not in optional]
        _verify_same({k: v for k, v in flat.items() if k.split(".", 1)[0] in names}, metadata, parts=names, path=path)
        return names


def latest(directory: Path) -> int | None:
    """Step that `latest` names in a folder of checkpoints; None when there is no such file.

    Raises:
        CheckpointError: the file holds something else.
    """
    pointer = directory / "latest"
    if not pointer.exists():
        return None
    text = pointer.read_text().strip()
    named = re.fullmatch(r"step-(\d+)", text)
    if named is None:
        raise CheckpointError(f"{pointer} should hold the name of a checkpoint, step-N, not {text!r}")
    return int(named[1])


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def verify_files(path: Path) -> None:
    """Raise CheckpointError unless every file of a checkpoint is there and as long as when it was written."""
    others = f"checkpoints there: {steps(path.parent)}"
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} is incomplete ({error!r}); {others}") from error
    for name, size in files.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            raise CheckpointError(f"checkpoint {path} is incomplete: {name} has {found} of {size} bytes; {others}")


def _flatten(state: Parts) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, part in state.items() for key, value in part.state_dict().items()}


def _verify_same(flat: Mapping[str, Any], metadata: Metadata, *, parts: list[str], path: Path) -> None:
    saved = {k: v for k, v in metadata.state_dict_metadata.items() if k.split(".", 1)[0] in parts}
    complaints = [
        *_listed("missing in the checkpoint", sorted(set(flat) - set(saved))),
        *_listed("in the checkpoint only", sorted(set(saved) - set(flat))),
        *_listed("different", list(_mismatches(flat, saved))),
    ]
    if complaints:
        raise ValueError(f"checkpoint {path} is of another model:\n" + "\n".join(complaints))


def _mismatches(flat: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(set(flat) & set(saved)):
        there, here = _form(saved[key]), _form(flat[key])
        if there != here:
            yield f"{key}: saved {there}, here {here}"


def _form(value: Any) -> str:
    if isinstance(value, TensorStorageMetadata):
        return f"{tuple(value.size)} {value.properties.dtype}"
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "no tensor"


def _listed(title: str, keys: list[str], most: int = 8) -> list[str]:
    rest = [f"    and {len(keys) - most} more"] if len(keys) > most else []
    return [f"  {title}:", *(f"    {key}" for key in keys[:most]), *rest] if keys else []


def _root(error: BaseException) -> BaseException:
    """The OSError beneath DCP's wrapping and torch's stream errors, if there is one."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        if isinstance(seen, CheckpointException):
            seen = next(iter(seen.failures.values()))[0]
            error = seen
        else:
            seen = seen.__cause__ or seen.__context__
    return seen or error


def _cause(error: BaseException) -> str:
    """The root of an error, and the rank that met it where there are many."""
    met = sorted(error.failures) if isinstance(error, CheckpointException) and dist.is_initialized() else []
    return f"{f'rank {met[0]}: ' if met else ''}{_root(error)}"


def _is_coordinator() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
