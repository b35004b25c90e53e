"""A directory that is built once, however many processes ask for it first.

The build goes to a directory of its own and is renamed when it is whole: whoever sees the final name sees everything. A
file lock lets one process build while the others wait; the lock saves work and is not what makes this correct, so file
systems without locks only build more than once.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, filled by `build(an empty directory)` if it does not exist yet.

    Raises:
        ValueError: the place cannot be written to.
        OSError: the disk fails or is full; nothing is left behind.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = open(directory.with_name(f"{directory.name}.lock"), "wb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ValueError(f"cache {directory.parent} cannot be written to ({error.strerror}); set data.cache") from error
    with lock:
        alone = _lock(lock, directory)
        if not directory.is_dir():
            if alone:
                _clear(directory)
            _build(directory, build)
    return directory


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    unfinished = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    unfinished.mkdir()
    try:
        build(unfinished)
        try:
            os.rename(unfinished, directory)
        except OSError:
            if not directory.is_dir():  # else another process was first, without a lock to wait for
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _clear(directory: Path) -> None:
    """Remove what builders that were killed have left."""
    for left in directory.parent.glob(f"{glob.escape(directory.name)}.*{_UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def _lock(file: IO[bytes], directory: Path) -> bool:
    """Hold the lock until `file` is closed; False where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another process to prepare %s", directory)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("no file locks in %s (%s): every process prepares it for itself", directory.parent, error.strerror)
        return False
    return True
