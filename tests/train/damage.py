"""What disks, copies and people do to the files of a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path


def invert(file: Path, *, count: int = 64, at: int | None = None) -> None:
    """Invert `count` bytes, in the middle unless it is said where."""
    content = bytearray(file.read_bytes())
    start = (len(content) - count) // 2 if at is None else at
    content[start : start + count] = bytes(255 - byte for byte in content[start : start + count])
    file.write_bytes(content)


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.distcp"))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGES = {
    "inverted": lambda path: invert(shards(path)[0]),
    "truncated": lambda path: truncate(shards(path)[0]),
    "empty": lambda path: shards(path)[0].write_bytes(b""),
    "file gone": lambda path: shards(path)[0].unlink(),
    "metadata": lambda path: invert(path / ".metadata", at=0),
    "metadata gone": lambda path: (path / ".metadata").unlink(),
    "manifest": lambda path: invert(path / "manifest.json", count=8),
    "manifest empty": lambda path: (path / "manifest.json").write_text(""),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "another step": lambda path: _retell(path / "manifest.json", step=4),
}
"""By name, what happens to the checkpoint in a directory."""


def _retell(manifest: Path, **changes: object) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


def without_checksums(checkpoint: Path) -> None:
    """As versions wrote it that told the sizes of files alone."""
    told = json.loads((checkpoint / "manifest.json").read_text())
    sizes = {name: each["bytes"] for name, each in told["files"].items()}
    (checkpoint / "manifest.json").write_text(json.dumps({"step": told["step"], "files": sizes}))
