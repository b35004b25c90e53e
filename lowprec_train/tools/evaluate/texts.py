"""Where evaluated text comes from: files of text, or a set prepared by `lowprec prepare-data` or by Megatron.

Either gives documents as token ids without the token that closes them, and the bytes of text that they stand for, so
that a raw file and what was prepared from it are the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lowprec_train.data.documents import TextFiles
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.manifest import Manifest
from lowprec_train.data.tokenizer import Tokenizer, batches, load


@dataclass(frozen=True)
class Encoded:
    """A document: its ids, and the bytes of its text in UTF-8, None where there is no tokenizer to tell."""

    ids: NDArray[np.int64]
    bytes: int | None


class Source(Protocol):
    """Documents that can be read again and again, in the same order."""

    name: str
    tokenizer: Tokenizer | None

    def __iter__(self) -> Iterator[Encoded]: ...


class RawText:
    """Text files, as `data.documents.TextFiles` reads them, without empty documents, which no prepared set has; raises
    what it raises.
    """

    def __init__(self, path: Path, field: str, tokenizer: Tokenizer) -> None:
        self.name, self._tokenizer = str(path), tokenizer
        self.tokenizer: Tokenizer | None = tokenizer
        self._documents = TextFiles(str(path), field)

    def __iter__(self) -> Iterator[Encoded]:
        for batch in batches(document.text for document in self._documents if document.text):
            for text, ids in zip(batch, self._tokenizer.encode(batch), strict=True):
                yield Encoded(np.asarray(ids, np.int64), len(text.encode()))


class PreparedText:
    """An indexed dataset, named by its prefix. Its bytes are those of its decoded documents.

    Raises:
        ValueError: the dataset contradicts itself, or another tokenizer made it.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer | None) -> None:
        self.name, self._dataset = str(prefix), IndexedDataset(prefix)
        self.tokenizer = _tokenizer_of(prefix, tokenizer)

    def __iter__(self) -> Iterator[Encoded]:
        dataset, closing = self._dataset, None if self.tokenizer is None else self.tokenizer.eod
        for first, end in zip(dataset.documents[:-1], dataset.documents[1:]):
            parts = [dataset[sequence] for sequence in range(first, end)]
            ids = np.concatenate([np.empty(0, dataset.dtype), *parts]).astype(np.int64)
            ids = ids[:-1] if len(ids) and ids[-1] == closing else ids
            yield Encoded(ids, None if self.tokenizer is None else len(self.tokenizer.decode(ids.tolist()).encode()))


def open_text(path: Path, *, field: str, tokenizer: Tokenizer | None) -> Source:
    """The documents of files of text, or of the prepared set with this prefix (or with this .bin or .idx).

    Raises ValueError when neither is there, and for raw text without a tokenizer.
    """
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if Path(f"{prefix}.idx").is_file():
        return PreparedText(prefix, tokenizer)
    if tokenizer is None:
        raise ValueError(f"{path} is text, and no tokenizer is known for the model: name it with --tokenizer")
    return RawText(path, field, tokenizer)


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
