"""Convert text to tokens on disk: a tokenizer trained on the text itself, a split by document, and a cache.

The first use writes a directory named after the SHA-256 of everything that decides its content (documents, tokenizer
settings, versions); later uses map it:

    tokenizer.model                      SentencePiece, or tokenizer.json
    {train,valid}_text_document.bin,idx  Megatron's layout, each document ends with the end-of-document token
    corpus.json                          hash, sizes and versions

The hash is the SHA-256 of train's .bin followed by valid's: runs with equal hashes read the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.data import sentencepiece_model as learning
from lowprec_train.data.appending import AppendingWriter, forget
from lowprec_train.data.cache import build_once
from lowprec_train.data.documents import Document, Documents
from lowprec_train.data.indexed import token_dtype
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import Tokenizer, encode_documents, store

_log = logging.getLogger(__name__)
_LAYOUT = 3  # of the cache directory; increased if the same text gives other tokens or files
DEFAULT_CACHE = "~/.cache/lowprec_train"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared corpus: its two splits (prefixes of indexed datasets), its hash, its tokenizer's size and file."""

    train: Path
    valid: Path
    hash: str
    vocab_size: int
    tokenizer: Path


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Text to tokenise, and how.

    `valid` None: documents of `train` are held out if a draw from their names is below `valid_fraction`.
    `tokenizer` None: one of `vocab_size` pieces is trained on the training documents.
    """

    train: Documents
    valid: Documents | None = None
    valid_fraction: float = 0.05
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.valid is None and not 0 < self.valid_fraction < 1:
            raise ValueError(f"valid_fraction {self.valid_fraction} must lie between 0 and 1")

    def run(self, cache: str | None, name: str) -> Prepared:
        """Return the prepared corpus, from `cache` (None: the user's cache) if it is there.

        Raises:
            ValueError: a split has no text, the text cannot fill the vocabulary, or the cache cannot be written.
        """
        place = Path(cache or DEFAULT_CACHE).expanduser() / f"{name}-{self.digest()[:16]}"
        directory = build_once(place, self._build)
        about = directory / "corpus.json"
        try:
            described = json.loads(about.read_text())
            return Prepared(
                train=_prefix(directory, "train"),
                valid=_prefix(directory, "valid"),
                hash=described["hash"],
                vocab_size=described["vocab_size"],
                tokenizer=directory / described["tokenizer"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{about} cannot be read ({error}); remove {directory} to prepare it again") from error

    def digest(self) -> str:
        """Return the hash of everything that decides the tokens."""
        parts = {
            "layout": _LAYOUT,
            "train": self.train.digest(),
            "valid": self.valid.digest() if self.valid else self.valid_fraction,
            "tokenizer": self._tokenizer_digest(),
            **(self.tokenizer or SentencePieceTokenizer).versions,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _tokenizer_digest(self) -> Any:
        if self.tokenizer:
            return self.tokenizer.digest
        return [self.vocab_size, learning.SAMPLE_CHARACTERS, learning.SETTINGS]

    def _split(self, held_out: bool) -> Iterator[Document]:
        """Return the documents of train or of valid that have text."""
        if self.valid:
            return (doc for doc in (self.valid if held_out else self.train) if doc.text)
        return (doc for doc in self.train if doc.text and is_held_out(doc.name, self.valid_fraction) == held_out)

    def _build(self, directory: Path) -> None:
        began = time.monotonic()
        _log.info("preparing %s (once; kept in %s)", self.train.name, directory.parent)
        self._check_splits()
        tokenizer = self.tokenizer or self._learn()
        store(tokenizer, directory)
        counts = {
            "train": _tokenise(self._split(held_out=False), tokenizer, _prefix(directory, "train")),
            "valid": _tokenise(self._split(held_out=True), tokenizer, _prefix(directory, "valid")),
        }
        described = {
            "hash": _hash(directory),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "tokenizer": tokenizer.file_name,
            "documents": counts,
            **tokenizer.versions,
        }
        (directory / "corpus.json").write_text(json.dumps(described, indent=2) + "\n")
        _log.info("prepared %s documents in %.1f s", counts, time.monotonic() - began)

    def _check_splits(self) -> None:
        for collection in (self.train, self.valid or self.train):
            if not any(doc.text.strip() for doc in collection):
                raise ValueError(f"empty corpus: no text in {collection.name}, or nothing but white space")
        for split, held_out in (("train", False), ("valid", True)):
            if next(self._split(held_out), None) is None:
                documents = sum(1 for doc in self.train if doc.text)
                raise ValueError(
                    f"the {split} split is empty: valid_fraction {self.valid_fraction} of {documents} documents in "
                    f"{self.train.name}, drawn by their names; change data.valid_fraction, name held-out files with "
                    "data.valid=..., or cut the text into more documents (a line of .jsonl is one, so is a .txt file)"
                )

    def _learn(self) -> SentencePieceTokenizer:
        assert self.vocab_size is not None
        texts = (doc.text for doc in self._split(held_out=False))
        learnt = SentencePieceTokenizer.train(texts, self.vocab_size, self.train.name)
        assert learnt.vocab_size == self.vocab_size, (learnt.vocab_size, self.vocab_size)
        return learnt


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether the document of this name is for validation: a draw from its name, true for this fraction."""
    draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return draw < fraction * 2**64


def _tokenise(documents: Iterable[Document], tokenizer: Tokenizer, prefix: Path) -> int:
    """Write each document and its end-of-document token; return the number of documents."""
    dtype = token_dtype(tokenizer.vocab_size)
    with AppendingWriter(prefix, dtype, {}) as writer:
        for ids in encode_documents((doc.text for doc in documents), tokenizer):
            tokens = np.array([*ids, tokenizer.eod], dtype)
            writer.append(tokens.tobytes(), np.array([len(tokens)]))
        writer.finish({})
    forget(prefix)
    return writer.documents


def _prefix(directory: Path, split: str) -> Path:
    return directory / f"{split}_text_document"


def _hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for split in ("train", "valid"):
        with open(f"{_prefix(directory, split)}.bin", "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
