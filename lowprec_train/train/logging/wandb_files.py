"""Read the local files of a W&B run, `wandb/[offline-]run-DATE-ID/run-ID.wandb`.

A file is a log in LevelDB's format: a header of 7 bytes, then blocks of 32 KiB with chunks

    checksum (4 bytes), length n (2, little endian), kind (1), n bytes        kind: 1 whole, 2 first, 3 middle, 4 last

The joined payloads are W&B's protobuf records. A chunk does not cross a block; fewer than 7 bytes at the end of a block
are padding. W&B buffers its writes, so the file of a killed launch may end within a record. `mend` cuts the file after
its last complete record, because `wandb sync` stops at an incomplete one and does not reach the files of later
launches. A record that is not a protobuf message, e.g. after a disk lost a block, counts as incomplete.

An online launch also keeps its file, as `run-DATE-ID`, whatever part of it the server has.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER, BLOCK = 7, 32 * 1024
CHUNK_HEADER = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4


def files(run: Path) -> list[Path]:
    """Return W&B's files in a run directory, one per launch, in the order of their start."""
    found = [path for path in (run / "wandb").glob("*run-*/run-*.wandb") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))


def run_id(file: Path) -> str:
    """Return the W&B run id in the name of a file."""
    return file.stem.removeprefix("run-")


def history(file: Path) -> list[dict[str, Any]]:
    """Return the points of a file, each with its `_step`. Needs the wandb package."""
    points = []
    for record, _ in messages(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return points


def last_step(run: Path, identity: str) -> int:
    """Return the last step of a W&B run on disk, in files of online launches too; 0 if there is none."""
    steps = [point["_step"] for file in files(run) if run_id(file) == identity for point in history(file)]
    return max(steps, default=0)


def mend(file: Path) -> None:
    """Cut the file of an ended launch after its last complete record. A file without one is renamed, and W&B ignores
    it. Needs the wandb package.
    """
    log = file.read_bytes()
    end = max((end for _, end in messages(log)), default=0)
    if not end:
        file.rename(file.with_name(f"{file.name}.empty"))
    elif end < len(log):
        os.truncate(file, end)


def messages(log: bytes) -> Iterator[tuple[Any, int]]:
    """Yield W&B's records up to the first unreadable one, each with its end position."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    schema: Any = wandb_internal_pb2
    for payload, end in records(log):
        try:
            yield schema.Record.FromString(payload), end
        except DecodeError:
            return


def records(log: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records of a log, each with its end position."""
    position, parts = FILE_HEADER, b""
    while position + CHUNK_HEADER.size <= len(log):
        left = BLOCK - position % BLOCK
        if left < CHUNK_HEADER.size:
            position += left
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(log, position)
        position += CHUNK_HEADER.size
        chunk = log[position : position + length]
        if not kind or len(chunk) < length:
            return
        position += length
        parts = chunk if kind in (WHOLE, FIRST) else parts + chunk
        if kind in (WHOLE, LAST):
            yield parts, position
