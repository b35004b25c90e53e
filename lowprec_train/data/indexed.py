"""Megatron's indexed dataset: token sequences in two memory-mapped files.

`<prefix>.bin` has the tokens of all sequences, one after the other. `<prefix>.idx` has their positions (little-endian,
no padding; S sequences, D - 1 documents):

    0         9 bytes   b"MMIDIDX\\0\\0"
    9         uint64    version = 1
    17        uint8     code of the token dtype
    18        uint64    S
    26        uint64    D
    34        int32[S]  tokens in each sequence
    34+4S     int64[S]  byte offset of each sequence in .bin
    34+12S    int64[D]  documents: document d is the sequences documents[d] .. documents[d+1]
    34+12S+8D int8[S]   modes, multimodal data only

Layout after megatron/core/datasets/indexed_dataset.py. Reading copies nothing: every array is a view of the mapping.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHECKED_AT_ONCE = 1 << 20  # sequences; limits the memory for the check of a large index


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores `vocab_size` different tokens: uint16 below 65,500, else int32."""
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


class IndexedDataset:
    """The sequences of `<prefix>.bin` and `<prefix>.idx`, mapped into memory; the prefix is given without extension.

    `data`: every token of the .bin, flat. `lengths` int32 [S] in tokens, `offsets` int64 [S] in bytes,
    `documents` int64 [D] sequence numbers, `modes` int8 [S] or None. `self[i]` is sequence i, a view.

    Raises:
        ValueError: a file is missing, truncated, of another format or inconsistent; names the path and the value.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (idx, bin_):
            if not path.is_file():
                bare = re.sub(r"\.(bin|idx)$", "", str(prefix))
                raise ValueError(f"{path}: no such file (an indexed dataset is named without extension, as {bare})")
        index = _map(idx)
        self.dtype, count, bounds = _read_header(idx, index)
        self.lengths = np.frombuffer(index, "<i4", count, HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
        self.documents = np.frombuffer(index, "<i8", bounds, HEADER.size + 12 * count)
        modes_at = HEADER.size + 12 * count + 8 * bounds
        self.modes = np.frombuffer(index, "<i1", count, modes_at) if len(index) > modes_at else None
        tokens = _map(bin_)
        self.data = np.frombuffer(tokens, self.dtype, len(tokens) // self.dtype.itemsize)
        _check_documents(idx, self.documents, count)
        _check_sequences(idx, bin_, self, len(tokens))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        start, length = int(self.offsets[sequence]), int(self.lengths[sequence])
        return self.data[start // self.dtype.itemsize :][:length]

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    def boundary(self, sequence: int) -> int:
        """Return the byte at which `sequence` begins; for sequence S, the byte after the last one."""
        if sequence < len(self):
            return int(self.offsets[sequence])
        return int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self) else 0


def write_index(file: IO[bytes], dtype: np.dtype[Any], lengths: np.ndarray, documents: np.ndarray) -> None:
    """Write an .idx: sequences of these lengths (int32 [S], in tokens) end to end, document bounds int64 [D]."""
    sizes = lengths.astype("<i8") * dtype.itemsize
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
    file.write(lengths.astype("<i4").tobytes())
    file.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
    file.write(documents.astype("<i8").tobytes())
    to_disk(file)


def to_disk(file: IO[bytes]) -> None:
    """Flush a file and sync it to disk."""
    file.flush()
    os.fsync(file.fileno())


def _map(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _read_header(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], int, int]:
    """Return the token dtype, S and D of an index, after a check of its size."""
    magic = bytes(index[: len(MAGIC)])
    if magic != MAGIC[: len(magic)]:
        raise ValueError(f"{path}: not a Megatron index: begins with {magic!r}, expected {MAGIC!r}")
    if len(index) < HEADER.size:
        raise ValueError(f"{path}: truncated: {len(index)} bytes, the header alone has {HEADER.size}")
    _, version, code, count, bounds = HEADER.unpack_from(index)
    if version != VERSION:
        raise ValueError(f"{path}: version {version}, can read {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{path}: unknown dtype code {code}, known: {sorted(DTYPES)}")
    size = HEADER.size + 12 * count + 8 * bounds
    if len(index) < size:
        raise ValueError(
            f"{path}: truncated: {len(index)} bytes, needs {size} for {count} sequences and {bounds} document bounds"
        )
    if len(index) not in (size, size + count):
        raise ValueError(
            f"{path}: {len(index)} bytes, expected {size} (or {size + count} with modes) for {count} sequences "
            f"and {bounds} document bounds"
        )
    return DTYPES[code], count, bounds


def _check_documents(path: Path, documents: np.ndarray, count: int) -> None:
    if not len(documents) or documents[0] != 0 or documents[-1] != count:
        ends = [int(bound) for bound in documents[[0, -1]]] if len(documents) else []
        raise ValueError(f"{path}: document bounds {ends} must begin with 0 and end with the {count} sequences")
    for part in parts(len(documents) - 1):
        steps = documents[part.start + 1 : part.stop + 1] - documents[part]
        if (steps < 0).any():
            raise ValueError(f"{path}: document {part.start + int(steps.argmin())} has {steps.min()} sequences")


def _check_sequences(idx: Path, bin_: Path, dataset: IndexedDataset, size: int) -> None:
    for part in parts(len(dataset)):
        lengths, offsets = dataset.lengths[part], dataset.offsets[part]
        if (lengths < 0).any():
            raise ValueError(f"{idx}: sequence {part.start + int(lengths.argmin())} has {lengths.min()} tokens")
        wrong = (offsets < 0) | (offsets % dataset.dtype.itemsize != 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(f"{idx}: sequence {part.start + at} begins at byte {offsets[at]}, not at a token")
        end = int((offsets + lengths.astype(np.int64) * dataset.dtype.itemsize).max())
        if end > size:
            raise ValueError(f"{bin_}: truncated: {size} bytes, its index reaches to byte {end}")


def parts(count: int) -> Iterator[slice]:
    """Yield slices that cover `count` sequences, each with the number of sequences that are checked at once."""
    for start in range(0, count, _CHECKED_AT_ONCE):
        yield slice(start, min(count, start + _CHECKED_AT_ONCE))
