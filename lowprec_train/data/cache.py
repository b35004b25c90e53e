"""A directory that is built once, even if several processes need it first.

A build goes to a temporary directory, which is renamed when it is complete, so the final name always has complete
content. A file lock lets one process build while the others wait. The lock only saves work: on file systems without
locks several processes build, with the same result.
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
    """Return `directory`, filled by `build(an empty directory)` if it does not exist.

    Raises:
        ValueError: the directory cannot be written.
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
                for left in directory.parent.glob(f"{glob.escape(directory.name)}.*{_UNFINISHED}"):
                    shutil.rmtree(left, ignore_errors=True)  # a killed builder left it
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
            if not directory.is_dir():  # otherwise another process was first, without a lock
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _lock(file: IO[bytes], directory: Path) -> bool:
    """Hold the lock until `file` is closed; return False if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another process to prepare %s", directory)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        _log.warning("no file locks in %s (%s): every process prepares it", directory.parent, error.strerror)
        return False
    return True
