"""Where evaluated text comes from: files of text, or a set prepared by `lowprec prepare-data` or by Megatron.

Either gives documents as token ids without the token that closes them, and the bytes of text that they stand for, so
that a raw file and what was prepared from it are the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowprec_train.data.documents import Document, TextFiles
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.manifest import Manifest
from lowprec_train.data.tokenizer import Tokenizer, batches, encode_documents, load


@dataclass(frozen=True)
class Encoded:
    """A document: its ids, and the bytes of its text in UTF-8, None where there is no tokenizer to tell."""

    ids: NDArray[np.int64]
    bytes: int | None


@dataclass(frozen=True)
class Source:
    """Documents that can be read again and again, in the same order, by the tokenizer that they are known by."""

    name: str
    tokenizer: Tokenizer | None
    read: Callable[[], Iterator[Encoded]]

    def __iter__(self) -> Iterator[Encoded]:
        return self.read()


def open_text(path: Path, *, field: str, tokenizer: Tokenizer | None, skip_bad: bool = False) -> Source:
    """The documents of files of text, or of the prepared set with this prefix (or with this .bin or .idx).

    Raises ValueError when neither is there, for raw text without a tokenizer or as `data.documents.TextFiles` does, and
    for a set that contradicts itself or that another tokenizer made.
    """
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        dataset, made_by = IndexedDataset(prefix), _tokenizer_of(prefix, tokenizer)
        return Source(str(prefix), made_by, lambda: _stored(dataset, made_by))
    if tokenizer is None:
        raise ValueError(f"{path} is text, and no tokenizer is known for the model: name it with --tokenizer")
    files = TextFiles(str(path), field, skip_bad=skip_bad)
    return Source(str(path), tokenizer, lambda: _encoded(files, tokenizer))


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode the documents that are not empty: no prepared set has empty ones."""
    for batch in batches(document.text for document in documents if document.text):
        for text, ids in zip(batch, encode_documents(batch, tokenizer), strict=True):
            yield Encoded(np.asarray(ids, np.int64), len(text.encode()))


def _stored(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Encoded]:
    """Read the documents of a prepared set; their bytes are those of the decoded text."""
    closing = None if tokenizer is None else tokenizer.eod
    for first, end in zip(dataset.documents[:-1], dataset.documents[1:]):
        parts = [dataset[sequence] for sequence in range(first, end)]
        ids = np.concatenate([np.empty(0, dataset.dtype), *parts]).astype(np.int64)
        ids = ids[:-1] if len(ids) and ids[-1] == closing else ids
        yield Encoded(ids, None if tokenizer is None else len(tokenizer.decode(ids.tolist()).encode()))


def _tokenizer_of(prefix: Path, tokenizer: Tokenizer | None) -> Tokenizer | None:
    manifest = Manifest.read(prefix)
    if manifest is None:
        return tokenizer
    if tokenizer is None:
        return load(manifest.tokenizer_path(prefix))
    if tokenizer.digest != manifest.tokenizer["sha256"]:
        raise ValueError(
            f"{prefix} was prepared with the tokenizer of SHA-256 {manifest.tokenizer['sha256'][:12]}, the model's is "
            f"{tokenizer.digest[:12]}"
        )
    return tokenizer
