"""Safetensors written while they are made: memory for one file's tensors, and no second copy of them.

Files are planned before the first tensor is there, from names, shapes and dtypes alone, since each is named by how many
there are: `model-00002-of-00005.safetensors`, and an index that says where each tensor lies. One file is
`model.safetensors` and needs no index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowprec_train.train.weights import INDEX_FILE

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, shape and dtype of a tensor that will be written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize


def size(text: str) -> int:
    """Bytes of `2GB`, `500MB`, `1000000`. Raises ValueError for anything else and for none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not a size such as 2GB or 500MB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def plan(slots: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Files of at most `max_bytes` (a larger tensor has one for itself), in the order given."""
    files: list[list[TensorSpec]] = []
    room = 0
    for slot in slots:
        if not files or slot.size > room:
            files.append([])
            room = max_bytes
        files[-1].append(slot)
        room -= slot.size
    return files


def write(directory: Path, slots: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write the tensors, which come in the order of `slots`, and the index of their files."""
    from safetensors.torch import save_file

    files, coming = plan(slots, max_bytes), iter(tensors)
    where: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        many = len(files) > 1
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        save_file(_gathered(content, coming), directory / file, metadata={"format": "pt"})
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # the library's files are their owner's alone
        where |= {slot.name: file for slot in content}
    assert next(coming, None) is None
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(slot.size for slot in slots)}, "weight_map": where}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _gathered(content: Sequence[TensorSpec], coming: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The next file's tensors."""
    made: dict[str, Tensor] = {}
    for slot, (name, tensor) in zip(content, coming, strict=False):
        assert (name, tensor.shape) == (slot.name, slot.shape), (slot, name, tensor.shape)
        made[name] = tensor.to(slot.dtype)
    assert len(made) == len(content)
    return made
