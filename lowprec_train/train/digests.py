"""The manifest of a checkpoint: manifest.json, with the size and the CRC-32s of every file.

    {"step": 8, "chunk_bytes": 33554432, "files": {"__0_0.distcp": {"bytes": 70000000, "crc32": ["0a1b2c3d", ...]}}}

A CRC-32 a chunk finds what disks and copies do to a file (any burst of up to 32 bits, and all but one in 4e9 of other
changes), and is the fastest hash of the standard library: 3.8 GB/s a core where SHA-256 takes 1.0 and BLAKE2b 0.7. It
is no proof against a person who wants to forge one. Every rank hashes the files that it wrote; at a load the ranks
share the chunks, each reads its own in threads, some of which hash while others wait for the disk.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowprec_train.data.appending import write_whole
from lowprec_train.train.launch import every, first

log = logging.getLogger(__name__)

FILE = "manifest.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint
CHUNK = 32 << 20  # bytes under one CRC-32
PIECE = 4 << 20  # read at once
THREADS = 4


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says where, why, and which checkpoint is intact."""


@dataclass(frozen=True)
class Digest:
    """A file's size, and the CRC-32 of each of its chunks in order; None: written by a version that took none."""

    bytes: int
    crc32: tuple[str, ...] | None

    @classmethod
    def of(cls, path: Path) -> Digest:
        """Of a file as it lies there now."""
        size = path.stat().st_size
        return cls(size, tuple(_crc32(path, start) for start in range(0, size, CHUNK)))


@dataclass(frozen=True)
class Manifest:
    """The files of the checkpoint in `directory`, by name."""

    directory: Path
    step: int
    files: Mapping[str, Digest]

    def write(self) -> None:
        """Write it; on disk when this returns. OSError when it cannot be written."""
        files = {name: {"bytes": each.bytes, "crc32": each.crc32} for name, each in self.files.items()}
        told = {"step": self.step, "chunk_bytes": CHUNK, "files": files}
        write_whole(self.directory / FILE, json.dumps(told).encode())

    @property
    def hashed(self) -> bool:
        """Whether the bytes of every file can be verified."""
        return all(digest.crc32 is not None for digest in self.files.values())

    def damage(self, index: int = 0, count: int = 1) -> str:
        """Read part `index` of `count` of all chunks; what is wrong with the first that is not as it was written, "" if
        all are.
        """
        chunks = [(name, i) for name, digest in sorted(self.files.items()) for i in range(len(digest.crc32 or ()))]
        share = chunks[len(chunks) * index // count : len(chunks) * (index + 1) // count]
        with ThreadPoolExecutor(THREADS, "verify") as pool:
            found = pool.map(lambda chunk: self._damage(*chunk), share)
            return next(filter(None, found), "")

    def _damage(self, name: str, chunk: int) -> str:
        digest, start = self.files[name], chunk * CHUNK
        assert digest.crc32 is not None
        try:
            same = _crc32(self.directory / name, start) == digest.crc32[chunk]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        end = min(start + CHUNK, digest.bytes)
        return "" if same else f"{name} is not as it was written: the CRC-32 of its bytes {start} to {end} differs"


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are there and as long as when they were written; else
    CheckpointError, which names the file.
    """
    try:
        told = json.loads((directory / FILE).read_bytes())
        manifest = Manifest(directory, told["step"], {name: _digest(each) for name, each in told["files"].items()})
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory} is incomplete ({FILE} is missing)") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory} cannot be read: {FILE}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {directory} is damaged: {FILE} is not what was written") from None
    if f"step-{manifest.step}" != directory.name or METADATA not in manifest.files:
        raise CheckpointError(f"checkpoint {directory} is damaged: {FILE} is of step {manifest.step!r}, or not whole")
    for name, digest in manifest.files.items():
        _check_size(directory, name, digest.bytes)
    if unknown := sorted({path.name for path in directory.glob("*.distcp")} - {*manifest.files}):
        raise CheckpointError(f"checkpoint {directory} is damaged: {FILE} says nothing of {unknown[0]}")
    return manifest


def _digest(told: Any) -> Digest:
    """As the manifest has it: before files were hashed it had their sizes alone."""
    size, crc32 = (told, None) if isinstance(told, int) else (told["bytes"], tuple(map(str, told["crc32"])))
    if not isinstance(size, int) or (crc32 is not None and len(crc32) != -(-size // CHUNK)):
        raise ValueError(told)
    return Digest(size, crc32)


def _check_size(directory: Path, name: str, size: int) -> None:
    try:
        found = (directory / name).stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory} is incomplete: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory} cannot be read: {name}: {error.strerror}") from error
    if found != size:
        raise CheckpointError(f"checkpoint {directory} is incomplete: {name} has {found} of {size} bytes")


def verify(directory: Path, group: dist.ProcessGroup | None = None, *, whole: bool = True) -> None:
    """Compare a checkpoint with its manifest: sizes and, if `whole`, bytes. All ranks, those of `group`, call it and
    share the reading. CheckpointError on all where a file is missing, or not as it was written; names the file.
    """
    manifest = first(lambda: read(directory), group)
    if not whole:
        return
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0 and not manifest.hashed:
        log.warning("warning: checkpoint %s was written without checksums: its bytes cannot be verified", directory)
    for damage in filter(None, every(lambda: manifest.damage(rank, ranks), group)):
        raise CheckpointError(f"checkpoint {directory} is damaged: {damage}")


def _crc32(path: Path, start: int) -> str:
    """Of the chunk that begins there."""
    buffer, value, left = memoryview(bytearray(PIECE)), 0, CHUNK
    with path.open("rb", buffering=0) as file:
        os.lseek(file.fileno(), start, os.SEEK_SET)
        for count in iter(partial(file.readinto, buffer), 0):
            value = zlib.crc32(buffer[: min(count, left)], value)
            if (left := left - count) <= 0:
                break
    return f"{value:08x}"
