"""Streaming writer of sharded safetensors: only the tensors of one file are in memory.

The number of files is part of their names (`model-00002-of-00005.safetensors`), so tensors are assigned to files from
names, shapes and dtypes before the first one is computed. An index maps each tensor to its file; a single file is
`model.safetensors`, without an index.
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
    """Parse a size in bytes (`2GB`, `500MB`, `1000000`). Raises ValueError for another form and for zero."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not a positive size such as 2GB or 500MB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def plan(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Assign tensors to files of at most `max_bytes`, in order; a larger tensor gets a separate file."""
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.size > room:
            files.append([])
            room = max_bytes
        files[-1].append(spec)
        room -= spec.size
    return files


def write(directory: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write (name, tensor) pairs, which arrive in the order of `specs`, and the index of the files."""
    from safetensors.torch import save_file

    files, stream = plan(specs, max_bytes), iter(tensors)
    file_of: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        many = len(files) > 1
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        save_file(_next_file(content, stream), directory / file, metadata={"format": "pt"})
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # safetensors creates files of mode 0600
        file_of |= {spec.name: file for spec in content}
    assert next(stream, None) is None
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(spec.size for spec in specs)}, "weight_map": file_of}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _next_file(content: Sequence[TensorSpec], stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for spec, (name, tensor) in zip(content, stream, strict=False):
        assert (name, tensor.shape) == (spec.name, spec.shape), (spec, name, tensor.shape)
        tensors[name] = tensor.to(spec.dtype)
    assert len(tensors) == len(content)
    return tensors
