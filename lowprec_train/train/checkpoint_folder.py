"""The directory of a run's checkpoints: list them, find the newest, move damaged ones aside.

    step-N            a complete checkpoint, renamed to this name after all its files are on disk
    latest            the name of the newest checkpoint, replaced after that
    damaged-step-N    a checkpoint whose bytes differ from its manifest, renamed when an older one was loaded instead
    .tmp-*            an unfinished save or removal

This module reads no tensors. Only rank 0 changes the directory.
"""

from __future__ import annotations

import os
import re
import shutil
from itertools import count
from pathlib import Path

from lowprec_train.data.appending import write_whole
from lowprec_train.train.digests import CheckpointError

POINTER = "latest"


def path_of(directory: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return directory / f"step-{step}"


def latest(directory: Path) -> int | None:
    """Return the step that `latest` names; None if there is no such file. Raises CheckpointError if the file cannot be
    read or parsed.
    """
    pointer = directory / POINTER
    try:
        text = pointer.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {pointer}: {error.strerror}") from error
    named = re.fullmatch(r"step-(\d+)", text)
    if named is None:
        raise CheckpointError(f"{pointer} must contain the name of a checkpoint, step-N, not {text[:80]!r}")
    return int(named[1])


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, ascending; empty if there is no directory. Raises
    CheckpointError if it cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {directory}: {error.strerror}") from error
    return sorted(int(named[1]) for named in (re.fullmatch(r"step-(\d+)", name) for name in names) if named)


def listed(directory: Path) -> str:
    """Return the list of a directory's checkpoints, for messages."""
    return f"checkpoints there: {steps(directory)}"


def to_load(directory: Path, requested: int | None = None) -> tuple[list[int], str]:
    """Return the steps to try, best first, and what is wrong with `latest` ("" if nothing is).

    The steps are `requested` alone, or the step that `latest` names and then the others, newest first. One checkpoint
    newer than `latest` is normal: a launch may die before it updates `latest`.

    Raises CheckpointError if `requested` does not exist, or if `latest` has content but there is no checkpoint.
    """
    there = steps(directory)[::-1]
    if requested is not None and requested not in there:
        raise CheckpointError(f"{directory} has no step-{requested}; {listed(directory)}")
    if requested is not None:
        return [requested], ""
    try:
        named = latest(directory)
    except CheckpointError as error:
        if not there:
            raise
        return there, str(error)
    if named is None:
        return there, f"{directory / POINTER} is missing" if there else ""
    if named not in there:
        gone = f"{directory / POINTER} names step-{named}, which does not exist"
        if not there:
            raise CheckpointError(f"{gone}; {listed(directory)}")
        return there, gone
    newer = [step for step in there[::-1] if step > named]
    problem = f"{directory / POINTER} names step-{named}, but there are newer checkpoints: {newer}"
    return [named, *(step for step in there if step != named)], problem if len(newer) > 1 else ""


def point_to(directory: Path, step: int) -> None:
    """Make `latest` name a checkpoint that is on disk. A directory of this name is kept as `latest.1`."""
    pointer = directory / POINTER
    if pointer.is_dir() and not pointer.is_symlink():
        pointer.rename(aside(pointer))
    write_whole(pointer, f"step-{step}\n".encode())
    sync(directory)


def set_aside(directory: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that loads, saves and removals ignore it. Returns its new path."""
    kept = directory / f"damaged-step-{step}"
    kept = path_of(directory, step).rename(aside(kept) if kept.exists() else kept)
    sync(directory)
    return kept


def aside(path: Path) -> Path:
    """Return the first of `<name>.1`, `<name>.2`, ... that does not exist."""
    return next(free for number in count(1) if not (free := path.with_name(f"{path.name}.{number}")).exists())


def prepare(directory: Path) -> None:
    """Create the directory, and finish or undo what a crashed launch left. Raises CheckpointError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)
        for replaced in directory.glob(".tmp-old-step-*"):
            final = directory / replaced.name.removeprefix(".tmp-old-")
            if not final.exists():  # died between the two renames of a replacement
                replaced.rename(final)
        for leftover in (*directory.glob(".tmp-*"), *directory.glob(f"{POINTER}.partial")):
            remove(leftover)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {directory}: {error}") from error


def publish(directory: Path, partial: Path, step: int) -> None:
    """Rename a checkpoint that is on disk to its final name, and make `latest` name it."""
    sync(partial)
    final = path_of(directory, step)
    if final.exists():  # from a launch that died before it updated `latest`
        retire(directory, step)
    partial.rename(final)
    sync(directory)
    point_to(directory, step)


def retire(directory: Path, step: int) -> None:
    """Hide a checkpoint with one rename, so that an interrupted removal leaves no partial step-N."""
    path_of(directory, step).rename(directory / f".tmp-old-step-{step}")


def clear(directory: Path) -> None:
    """Remove the retired checkpoints."""
    for retired in directory.glob(".tmp-old-step-*"):
        remove(retired)


def remove(path: Path) -> None:
    """Remove a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(directory: Path) -> None:
    """Sync a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
