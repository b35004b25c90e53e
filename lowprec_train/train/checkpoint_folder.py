"""The folder of a run's checkpoints: list them, find the newest, move damaged ones aside.

    step-N            a complete checkpoint: it gets its name by a rename, once all of it is on disk
    latest            the name of the newest, replaced after that
    damaged-step-N    one whose bytes were not those that were written, when an older one was taken in its place
    .tmp-*            what a save or a removal has not finished

Nothing here reads a tensor, and only rank 0 comes here.
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
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step}"


def latest(directory: Path) -> int | None:
    """Step that `latest` names in a folder of checkpoints; None when there is no such file. CheckpointError when the
    file holds something else, or cannot be read.
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
        raise CheckpointError(f"{pointer} should hold the name of a checkpoint, step-N, not {text[:80]!r}")
    return int(named[1])


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending; none where there is no folder. CheckpointError when it cannot be
    read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {directory}: {error.strerror}") from error
    return sorted(int(named[1]) for named in (re.fullmatch(r"step-(\d+)", name) for name in names) if named)


def listed(directory: Path) -> str:
    """The checkpoints of a folder, for a message."""
    return f"checkpoints there: {steps(directory)}"


def to_load(directory: Path, asked: int | None = None) -> tuple[list[int], str]:
    """The steps to try, best first: `asked` alone, else the one that `latest` names, then the newest. Second: what is
    wrong with `latest`, "" if nothing is. A launch that dies before it points leaves one newer checkpoint, and no more.

    Raises CheckpointError where `asked` is not there, and where `latest` has a content and there is no checkpoint.
    """
    there = steps(directory)[::-1]
    if asked is not None and asked not in there:
        raise CheckpointError(f"{directory} has no step-{asked}; {listed(directory)}")
    if asked is not None:
        return [asked], ""
    try:
        named = latest(directory)
    except CheckpointError as error:
        if not there:
            raise
        return there, str(error)
    if named is None:
        return there, f"{directory / POINTER} is missing" if there else ""
    if named not in there:
        gone = f"{directory / POINTER} names step-{named}, which is not there"
        if not there:
            raise CheckpointError(f"{gone}; {listed(directory)}")
        return there, gone
    newer = [step for step in there[::-1] if step > named]
    told = f"{directory / POINTER} names step-{named}, and there are newer ones: {newer}"
    return [named, *(step for step in there if step != named)], told if len(newer) > 1 else ""


def point_to(directory: Path, step: int) -> None:
    """Let `latest` name a checkpoint that is on disk."""
    write_whole(directory / POINTER, f"step-{step}\n".encode())
    sync(directory)


def set_aside(directory: Path, step: int) -> Path:
    """Move a damaged checkpoint out of the way of loads, saves and removals; where to."""
    kept = directory / f"damaged-step-{step}"
    kept = path_of(directory, step).rename(aside(kept) if kept.exists() else kept)
    sync(directory)
    return kept


def aside(path: Path) -> Path:
    """The first of `<name>.1`, `<name>.2`, ... that does not exist."""
    return next(free for number in count(1) if not (free := path.with_name(f"{path.name}.{number}")).exists())


def prepare(directory: Path) -> None:
    """Make the folder; finish or undo what a launch that died has left. CheckpointError when it cannot be."""
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
    """Give a checkpoint that is on disk its name, and let `latest` name it."""
    sync(partial)
    final = path_of(directory, step)
    if final.exists():  # of a launch that died before it pointed to it
        retire(directory, step)
    partial.rename(final)
    sync(directory)
    point_to(directory, step)


def retire(directory: Path, step: int) -> None:
    """Out of sight in one rename: a removal that is cut short must not leave half a step-N."""
    path_of(directory, step).rename(directory / f".tmp-old-step-{step}")


def clear(directory: Path) -> None:
    """Remove what was retired."""
    for retired in directory.glob(".tmp-old-step-*"):
        remove(retired)


def remove(path: Path) -> None:
    """A file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync(directory: Path) -> None:
    """Names in a folder are on disk when this returns."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
