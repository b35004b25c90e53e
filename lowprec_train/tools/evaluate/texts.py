"""Readers of the evaluated text: text files, or a data set prepared by `lowprec prepare-data` or by Megatron.

Both give documents as token ids without the closing end-of-document token, and the number of UTF-8 bytes of each
document. A raw file and the data set prepared from it therefore give equal results, except for bits per byte of text
that contains U+2581: SentencePiece decodes this character as a space, and the bytes of a data set are those of decoded
text.
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
    """A document: its token ids, and the UTF-8 bytes of its text (None without a tokenizer)."""

    ids: NDArray[np.int64]
    bytes: int | None


@dataclass(frozen=True)
class Source:
    """Documents and their tokenizer. Each iteration reads the documents again, in the same order."""

    name: str
    tokenizer: Tokenizer | None
    read: Callable[[], Iterator[Encoded]]

    def __iter__(self) -> Iterator[Encoded]:
        return self.read()


def open_text(path: Path, *, field: str, tokenizer: Tokenizer | None, skip_bad: bool = False) -> Source:
    """Open text files, or the prepared data set with this prefix (or .bin or .idx file).

    Raises ValueError if neither exists, for raw text without a tokenizer, for unreadable text
    (`data.documents.TextFiles`), and for a data set that is inconsistent or was prepared with another tokenizer.
    """
    named = path.suffix in (".bin", ".idx") and not Path(f"{path}.idx").is_file()
    prefix = path.with_suffix("") if named else path
    if Path(f"{prefix}.idx").is_file():
        dataset, made_by = IndexedDataset(prefix), _tokenizer_of(prefix, tokenizer)
        if dataset.dtype.kind == "f":
            raise ValueError(f"{prefix}: holds {dataset.dtype} numbers, not token ids")
        return Source(str(prefix), made_by, lambda: _stored(dataset, made_by))
    if tokenizer is None:
        raise ValueError(f"{path} is raw text, and the model has no tokenizer; give one with --tokenizer FILE")
    files = TextFiles(str(path), field, skip_bad=skip_bad)
    return Source(str(path), tokenizer, lambda: _encoded(files, tokenizer))


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode the non-empty documents; a prepared data set has no empty documents."""
    for batch in batches(document.text for document in documents if document.text):
        for text, ids in zip(batch, encode_documents(batch, tokenizer), strict=True):
            yield Encoded(np.asarray(ids, np.int64), len(text.encode()))


def _stored(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Iterator[Encoded]:
    """Read the documents of a prepared data set. Bytes are counted in the decoded text."""
    closing = None if tokenizer is None else tokenizer.eod
    for number, (first, end) in enumerate(zip(dataset.documents[:-1], dataset.documents[1:])):
        parts = [dataset[sequence] for sequence in range(first, end)]
        ids = np.concatenate([np.empty(0, dataset.dtype), *parts]).astype(np.int64)
        ids = ids[:-1] if len(ids) and ids[-1] == closing else ids
        if tokenizer and (wrong := ids[(ids < 0) | (ids >= tokenizer.vocab_size)]).size:
            raise ValueError(
                f"{dataset.prefix}: document {number} has token id {wrong[0]}, but the tokenizer has "
                f"{tokenizer.vocab_size} tokens"
            )
        yield Encoded(ids, None if tokenizer is None else len(tokenizer.decode(ids.tolist()).encode()))


def _tokenizer_of(prefix: Path, tokenizer: Tokenizer | None) -> Tokenizer | None:
    manifest = Manifest.read(prefix)
    if manifest is None:
        return tokenizer
    if tokenizer is None:
        return load(manifest.tokenizer_path(prefix))
    if tokenizer.digest != manifest.tokenizer["sha256"]:
        raise ValueError(
            f"{prefix} was prepared with a tokenizer of SHA-256 {manifest.tokenizer['sha256'][:12]}, but the model's "
            f"tokenizer has {tokenizer.digest[:12]}; evaluate the raw text instead"
        )
    return tokenizer
