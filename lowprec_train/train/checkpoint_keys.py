"""Check that a checkpoint fits the model: its keys, and the shape and dtype of each, before any data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lowprec_train.train.digests import METADATA, CheckpointError


def read_metadata(reader: FileSystemReader) -> Metadata:
    """Read the metadata of a checkpoint. Raises CheckpointError if that fails."""
    try:
        return reader.read_metadata()
    except Exception as error:  # unpickling garbage raises anything
        raise CheckpointError(f"checkpoint {reader.path} is damaged: {METADATA} cannot be read: {error}") from error


def same_keys(flat: Mapping[str, Any], metadata: Metadata, *, parts: list[str], path: Path) -> None:
    """Raise ValueError unless the checkpoint in `path` has the keys, shapes and dtypes of `flat`.

    parts: first words of the keys to compare.
    """
    saved = {k: v for k, v in metadata.state_dict_metadata.items() if k.split(".", 1)[0] in parts}
    complaints = [
        *_listed("missing in the checkpoint", sorted(set(flat) - set(saved))),
        *_listed("in the checkpoint only", sorted(set(saved) - set(flat))),
        *_listed("different", list(_mismatches(flat, saved))),
    ]
    if complaints:
        raise ValueError(f"checkpoint {path} is of another model:\n" + "\n".join(complaints))


def _mismatches(flat: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(set(flat) & set(saved)):
        there, here = _form(saved[key]), _form(flat[key])
        if there != here:
            yield f"{key}: saved {there}, here {here}"


def _form(value: Any) -> str:
    if isinstance(value, TensorStorageMetadata):
        return f"{tuple(value.size)} {value.properties.dtype}"
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else "not a tensor"


def _listed(title: str, keys: list[str], most: int = 8) -> list[str]:
    rest = [f"    and {len(keys) - most} more"] if len(keys) > most else []
    return [f"  {title}:", *(f"    {key}" for key in keys[:most]), *rest] if keys else []
