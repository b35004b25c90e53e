"""Checkpoints that survive crashes, signals and full disks.

    stage     copy the state to host memory; training continues
    write     torch.distributed.checkpoint (DCP) into checkpoints/.tmp-step-N, and a manifest; both synced to disk
    publish   rename to checkpoints/step-N, then write-and-rename `latest`

`latest` names the newest complete checkpoint and is written last, so a run resumes from a complete checkpoint whenever
a process dies. A load compares every file with the manifest, including its bytes, and reads the metadata. A checkpoint
of another model is refused, with the keys, before the model is changed. DCP then fills the live tensors in place,
without a second copy of the state and without casts. A damaged checkpoint is moved aside, and the newest intact one is
loaded instead.

With several processes each rank writes, hashes and reads its own shards. Rank 0 alone removes what a crash left,
publishes after all ranks have written and synced, deletes old checkpoints, and chooses the checkpoint to load. A save
that fails on one rank fails on all ranks with the same message.

A checkpoint maps names to parts. Each part is a `Stateful` with a flat state_dict: `model.<fqn>`,
`optimizer.<fqn>.exp_avg`, `trainer.step`. Hyper-parameters are not saved: they come from the configuration.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from lowprec_train.train import checkpoint_folder as folder
from lowprec_train.train.checkpoint_keys import read_metadata, same_keys
from lowprec_train.train.diagnostics import finite
from lowprec_train.train.digests import METADATA, CheckpointError, Digest, Manifest, verify
from lowprec_train.train.launch import every, first
from lowprec_train.train.states import ModelState, OptimizerState

__all__ = ["CheckpointError", "Checkpointer", "ModelState", "OptimizerState"]

log = logging.getLogger(__name__)

Parts = Mapping[str, Stateful]
METRICS = frozenset({"sampling.sqnr_db"})  # infinite if no gradient was rounded, NaN if one was not finite

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Writer(dcp.FileSystemWriter):
    """A file writer that raises the original error of a failed write. Exceptions lose their causes when they are sent
    to other processes, so DCP's wrapped error would hide it. names: the files that this process has written.
    """

    names: frozenset[str] = frozenset()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
            self.names = frozenset(each.storage_data.relative_path for each in written.wait())
        except Exception as error:
            raise _root(error) from None
        return written


class _Planner(DefaultSavePlanner):
    """Saves a replicated tensor on one rank only, and entries that are not tensors on rank 0: only rank 0 has sinks,
    which add such entries.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        return plan if self.is_coordinator else replace(plan, items=tensors)


class Checkpointer:
    """Saves and loads the checkpoints of one run. At most one save is in flight; the next call raises its error.

    With several processes, all of them create it and call `save`, `finish` and `load` in the same order.

    Args:
        directory: `<run>/checkpoints`; created if absent. Partial files of a crashed save are removed.
        interval: steps between two saves, >= 1.
        keep: number of newest checkpoints to keep, >= 1.
        asynchronous: write in a background thread, from a staged copy.
        verify: compare the bytes of files with the manifest on load; file sizes are always compared.
        kept: further steps to save at, whose checkpoints are never deleted.
        process_group: a gloo group of all ranks that nothing else uses, because a save runs beside the training step.

    Raises ValueError for an interval or keep below 1, CheckpointError if the directory cannot be created.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        interval: int,
        keep: int,
        asynchronous: bool = True,
        verify: bool = True,
        kept: Collection[int] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("interval", interval), ("keep", keep)):
            if value < 1:
                raise ValueError(f"checkpoint {name}={value} must be at least 1")
        self._directory = Path(directory)
        self._interval, self._keep, self._group = interval, keep, process_group
        self._bytes, self._kept = verify, frozenset(kept)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._executor = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._save: Future[None] | None = None
        first(lambda: folder.prepare(self._directory), self._group)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due at `step`."""
        return step % self._interval == 0 or step in self._kept

    def save(self, state: Parts, step: int, wait: bool = False, *, only_finite: bool = False) -> None:
        """Save `state` as step-`step`. Without `wait` an asynchronous save continues in the background.

        only_finite: refuse to save if a tensor other than METRICS has NaN or infinity on any rank.

        Raises CheckpointError if this save or an earlier background save failed, or if a tensor is not finite. The
        checkpoint that `latest` names stays intact.
        """
        self.finish()
        flat = _flatten(state)
        if only_finite and (bad := self._not_finite(flat)):
            raise CheckpointError(self._complaint(step, ValueError(f"NaN or infinity in {finite.summary(bad)}")))
        if self._executor is None:
            self._write(flat, step)
            return
        staged = self._stager.stage(flat)
        self._save = self._executor.submit(self._write, staged, step)
        if wait:
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether a background save has failed. The next `save` or `finish` raises its error."""
        return self._save is not None and self._save.done() and self._save.exception() is not None

    def check(self) -> None:
        """Raise the error of a failed background save, without waiting.

        Does nothing with several processes: ranks see the failure at different times, and a rank that raises alone
        leaves the others waiting. Use `failed` as a reason for all ranks to stop.
        """
        if self.failed and not dist.is_initialized():
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight and raise its error, if any."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def load(self, state: Parts, step: int | None = None, *, optional: Collection[str] = ()) -> int | None:
        """Fill `state` from checkpoint `step`, or from the one that `latest` names. Returns its step; None without any.

        Without `step`, if that checkpoint or `latest` is damaged, the newest intact checkpoint is loaded and a warning
        is logged. Damaged checkpoints are renamed to damaged-step-N, and `latest` names the loaded one.

        optional: parts that keep their values if the checkpoint does not have them.

        Raises:
            ValueError: the checkpoint is of another model; lists the keys, shapes and dtypes that differ. Nothing is
                changed.
            CheckpointError: no checkpoint to load is intact. Nothing on disk is changed.
        """
        self.finish()
        found, wrong = first(lambda: folder.to_load(self._directory, step), self._group)
        damaged: dict[int, CheckpointError] = {}
        for each in found:
            try:
                self._load(state, each, optional)
            except CheckpointError as error:
                damaged[each] = error
                continue
            first(lambda: self._settle(each, wrong, damaged), self._group)  # noqa: B023
            return each
        if not damaged:
            return None
        causes = "\n".join(str(error) for error in list(damaged.values())[:4])
        if step is not None:
            raise CheckpointError(f"{causes}; {folder.listed(self._directory)}")
        raise CheckpointError(
            f"{causes}\nNo checkpoint in {self._directory} is intact, and nothing was changed. Restore one, or use "
            "resume=never to move the run aside and start again."
        )

    def _load(self, state: Parts, step: int, optional: Collection[str]) -> None:
        """Fill `state` from one checkpoint, if its files are intact and its values, except METRICS, finite."""
        path, flat = folder.path_of(self._directory, step), _flatten(state)
        verify(path, self._group, whole=self._bytes)
        names = first(lambda: self._verify(path, flat, list(state), optional), self._group)
        flat = {key: value for key, value in flat.items() if key.split(".", 1)[0] in names}
        try:
            reader = dcp.FileSystemReader(path)
            dcp.load(flat, storage_reader=reader, process_group=self._group, no_dist=not dist.is_initialized())
        except (OSError, CheckpointException) as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {_cause(error)}") from error
        if bad := self._not_finite(flat):
            raise CheckpointError(f"checkpoint {path} holds NaN or infinity: {finite.summary(bad)}")
        for name in names:
            state[name].load_state_dict(
                {key.removeprefix(f"{name}."): v for key, v in flat.items() if key.startswith(f"{name}.")}
            )

    def _not_finite(self, flat: Mapping[str, Any]) -> finite.Found:
        """Return the tensors of the state that have NaN or infinity on any rank. Metrics may have them."""
        return finite.found_anywhere({key: value for key, value in flat.items() if key not in METRICS}, self._group)

    def _settle(self, step: int, wrong: str, damaged: Mapping[int, CheckpointError]) -> None:
        """Log that `step` was loaded in place of other checkpoints, and make `latest` name it."""
        if not (wrong or damaged):
            return
        folder.point_to(self._directory, step)
        moved = [f"{error}; kept as {folder.set_aside(self._directory, s).name}" for s, error in damaged.items()]
        log.warning("warning: %s; continuing from step-%d", "; ".join([*filter(None, [wrong]), *moved]), step)

    def latest(self) -> int | None:
        """As `checkpoint_folder.latest`."""
        return folder.latest(self._directory)

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending."""
        return folder.steps(self._directory)

    def _write(self, flat: dict[str, Any], step: int) -> None:
        partial = self._directory / f".tmp-step-{step}"
        writer = Writer(partial, sync_files=True)
        try:
            alone = not dist.is_initialized()
            dcp.save(flat, storage_writer=writer, planner=_Planner(), process_group=self._group, no_dist=alone)
            digests = every(lambda: {name: Digest.of(partial / name) for name in writer.names}, self._group)

            def publish() -> None:
                files = {METADATA: Digest.of(partial / METADATA)}
                for of_rank in digests:
                    files |= of_rank
                Manifest(partial, step, files).write()
                self._publish(partial, step)

            first(publish, self._group)
        except (Exception, CheckpointException) as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._complaint(step, error)) from error

    def _publish(self, partial: Path, step: int) -> None:
        folder.publish(self._directory, partial, step)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        older = [step for step in self.steps() if step < newest and step not in self._kept]
        for step in older[: max(0, len(older) - (self._keep - 1))]:
            folder.retire(self._directory, step)
        folder.clear(self._directory)

    def _complaint(self, step: int, error: BaseException) -> str:
        root = _root(error)
        full = isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        advice = "\nFree disk space or raise the limit, then start the run again: it resumes." if full else ""
        failed = f"checkpoint of step {step} could not be written to {self._directory}"
        return f"{failed}: {_cause(error)}; {self._intact()}.{advice}"

    def _intact(self) -> str:
        try:
            latest = self.latest()
        except CheckpointError as error:
            return str(error)
        if latest is None:
            return "there is no earlier checkpoint"
        return f"{folder.path_of(self._directory, latest)} is intact"

    def _verify(self, path: Path, flat: Mapping[str, Any], names: list[str], optional: Collection[str]) -> list[str]:
        """Return the names of the parts to load. Raises ValueError if the checkpoint is of another model."""
        metadata = read_metadata(dcp.FileSystemReader(path))
        there = {key.split(".", 1)[0] for key in metadata.state_dict_metadata}
        names = [name for name in names if name in there or name not in optional]
        same_keys({k: v for k, v in flat.items() if k.split(".", 1)[0] in names}, metadata, parts=names, path=path)
        return names


def _flatten(state: Parts) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, part in state.items() for key, value in part.state_dict().items()}


def _root(error: BaseException) -> BaseException:
    """Return the OSError under the wrapped errors of DCP and torch; without one the innermost DCP failure."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        if isinstance(seen, CheckpointException):
            seen = next(iter(seen.failures.values()))[0]
            error = seen
        else:
            seen = seen.__cause__ or seen.__context__
    return seen or error


def _cause(error: BaseException) -> str:
    """Return the first line of an error's root cause, with the rank if there are several."""
    met = sorted(error.failures) if isinstance(error, CheckpointException) and dist.is_initialized() else []
    root = _root(error)
    if isinstance(root, pickle.UnpicklingError):  # torch's text proposes to load code from the file
        return f"{f'rank {met[0]}: ' if met else ''}a file is damaged: it cannot be unpickled"
    return f"{f'rank {met[0]}: ' if met else ''}{(str(root) or type(root).__name__).splitlines()[0]}"
