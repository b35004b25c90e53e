"""torch's flight recorder: the last collectives that a process started, with their Python stacks.

torch records NCCL and gloo. NCCL's watchdog writes the records to `<prefix><rank>` before it aborts a process; for
gloo, and for unfinished collectives, this module reads them. `torchfrtrace` compares the files of the ranks. torch has
only a private function for reading, which this module wraps (decision 0008).
"""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

NAMES = ("_dump_nccl_trace", "_dump_fr_trace")  # the first if torch has NCCL


@dataclass(frozen=True)
class Begun:
    """An unfinished collective: name, seconds since its start, stack of (file, function) with the innermost first."""

    name: str
    seconds: float
    lines: list[tuple[str, str]]


def switch_on(prefix: Path) -> None:
    """Record 2,000 collectives, and make NCCL's watchdog write them to `<prefix><rank>`. Call it before the first
    process group is created.

    Variables that are already set, by their new or old names, keep their values.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def recording() -> bytes | None:
    """Return the recorder's content, a pickle; None if torch has no recorder for its back ends."""
    for name in NAMES:
        if dump := getattr(c10d, name, None):
            return bytes(dump())
    return None


def unfinished() -> Begun | None:
    """Return the oldest collective of this process that the device has not finished; None without one or a recorder.

    gloo's collectives are never marked as finished, so this works on GPUs only.
    """
    content = recording()
    entries: list[dict[str, Any]] = pickle.loads(content)["entries"] if content else []
    waiting = [entry for entry in entries if entry["state"] != "completed" and not entry["retired"]]
    if not waiting:
        return None
    oldest = min(waiting, key=lambda entry: entry["time_created_ns"])
    lines = [(line["filename"], line["name"]) for line in oldest["frames"]]
    return Begun(oldest["profiling_name"], (time.time_ns() - oldest["time_created_ns"]) / 1e9, lines)
