"""Datasets in Megatron's layout for tests, made of tokens that are at hand."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from lowprec_train.data.indexed import write_index


def write_indexed(
    prefix: Path, sequences: Iterable, dtype: DTypeLike = np.int32, bounds: Iterable[int] | None = None
) -> None:
    """`<prefix>.bin` and `.idx`. bounds: the first sequence of each document, and an end; None: each is a document."""
    parts, form = [np.asarray(each, dtype) for each in sequences], np.dtype(dtype).newbyteorder("<")
    Path(f"{prefix}.bin").write_bytes(b"".join(part.astype(form).tobytes() for part in parts))
    with open(f"{prefix}.idx", "wb") as file:
        documents = range(len(parts) + 1) if bounds is None else bounds
        write_index(file, form, np.array([len(part) for part in parts], np.int32), np.array([*documents], np.int64))
