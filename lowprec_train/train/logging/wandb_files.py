"""Read the files in which W&B stores a run on disk, `wandb/[offline-]run-DATE-ID/run-ID.wandb`.

A file is a log in LevelDB's format: 7 bytes of header, then blocks of 32 KiB of chunks

    checksum (4 bytes), length n (2, little endian), kind (1), n bytes        kind: 1 whole, 2 first, 3 middle, 4 last

whose payloads, joined, are W&B's own protobuf records. A chunk does not cross a block; fewer than 7 bytes at a block's
end are padding. W&B writes through a buffer, so the file of a killed launch ends early and maybe within a record: what
is whole before that counts, and `mend` leaves nothing else, for `wandb sync` stops at such an end and never gets to the
files of later launches. A record that is no protobuf message, from a disk that lost a block say, is such an end too.

An online launch keeps its file as `run-DATE-ID`, whatever of it the server has.
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
    """W&B's files in a run directory, one a launch, in the order in which they were begun."""
    found = [path for path in (run / "wandb").glob("*run-*/run-*.wandb") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: path.parent.name.removeprefix("offline-"))


def run_id(file: Path) -> str:
    """The W&B run id in the name of such a file."""
    return file.stem.removeprefix("run-")


def history(file: Path) -> list[dict[str, Any]]:
    """The points of such a file, each with its `_step`. Needs the wandb package."""
    points = []
    for record, _ in messages(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return points


def last_step(run: Path, identity: str) -> int:
    """The last step of a W&B run that is on disk, in files of online launches too; 0 where there is none."""
    steps = [point["_step"] for file in files(run) if run_id(file) == identity for point in history(file)]
    return max(steps, default=0)


def mend(file: Path) -> None:
    """Cut a file of a launch that has ended after its last whole record; without any it is out of W&B's sight.
    Needs the wandb package.
    """
    log = file.read_bytes()
    end = max((end for _, end in messages(log)), default=0)
    if not end:
        file.rename(file.with_name(f"{file.name}.empty"))
    elif end < len(log):
        os.truncate(file, end)


def messages(log: bytes) -> Iterator[tuple[Any, int]]:
    """W&B's records up to the first that cannot be read, each with the position of its end."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    schema: Any = wandb_internal_pb2
    for payload, end in records(log):
        try:
            yield schema.Record.FromString(payload), end
        except DecodeError:
            return


def records(log: bytes) -> Iterator[tuple[bytes, int]]:
    """The whole records of a log, each with the position of its end."""
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
