"""The tokenizer interface, and loading a tokenizer from a file.

There are two kinds: SentencePiece models (`sentencepiece_model`), which `lowprec train-tokenizer` trains, and
`tokenizer.json` files of Hugging Face's library (`huggingface`). Each has an end-of-document token, which ends every
document. Each is stored as files, beside prepared data or in an exported model, and `load` reads the same tokenizer
from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Protocol

from lowprec_train.data.appending import write_whole
from lowprec_train.data.cuts import TextSpan, blocks, pieces
from lowprec_train.data.huggingface import HuggingFaceTokenizer
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer

FILES = (HuggingFaceTokenizer.file_name, SentencePieceTokenizer.file_name)  # if a directory has both, the first is read
_AT_ONCE = 256  # documents per call of a tokenizer


class Tokenizer(Protocol):
    """Text to token ids and back; ids are below `vocab_size`, `eod` ends a document."""

    vocab_size: int
    eod: int

    @property
    def file_name(self) -> str:
        """The file that `load` reads."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents of the files to store, by name; `file_name` is one of them."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the ids, except `versions`."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Version of the library that computes the ids, by the name of the library."""

    def encode(self, texts: list[str], *, parallel: bool = True, continued: bool = False) -> list[list[int]]:
        """Return the token ids of each text, without an end-of-document token; on all cores, or on one if not parallel.

        continued: the texts follow a cut.
        """

    def cut(self, text: str) -> int | None:
        """Return the last place in an unfinished text where a cut changes no token; None if there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""


def load(path: str | Path, eod: str | None = None) -> Tokenizer:
    """Load the tokenizer of a file, whose content decides the kind; in a directory, `tokenizer.json` or else `.model`.

    `eod`: the token that ends documents; None: the tokenizer's own.

    Raises:
        ValueError: the file is missing or of neither kind, it has no such token or none that ends documents, or the
            package that reads it is not installed.
    """
    if not str(path):
        raise ValueError("no tokenizer is named: its path is empty")
    path = Path(path).expanduser()
    if path.is_dir():
        path = next((path / name for name in FILES if (path / name).is_file()), path / FILES[-1])
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer")
    content = path.read_bytes()
    if content.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer.read(path, eod)
    return SentencePieceTokenizer(content, str(path), eod)


def store(tokenizer: Tokenizer, directory: Path) -> Path:
    """Write the tokenizer's files atomically and sync them; return the path that `load` accepts.

    Raises:
        ValueError: another tokenizer is there.
        OSError: a file cannot be written, with its path.
    """
    others = [directory / name for name in FILES if name not in tokenizer.files and (directory / name).exists()]
    if others:
        raise ValueError(f"{others[0]}: another tokenizer is there; a directory has one tokenizer, choose another")
    for name, content in tokenizer.files.items():
        path = directory / name
        if not path.exists():
            write_whole(path, content, shared=True)
        elif path.read_bytes() != content:
            raise ValueError(f"{path}: another tokenizer is there; a directory has one tokenizer, choose another")
    return directory / tokenizer.file_name


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of a length that suits `Tokenizer.encode`."""
    remaining = iter(texts)
    while batch := list(islice(remaining, _AT_ONCE)):
        yield batch


def encode_pieces(pieces: Iterable[TextSpan], tokenizer: Tokenizer, *, parallel: bool = False) -> Iterator[list[int]]:
    """Yield the ids of each piece of documents."""
    for continued, run in groupby(pieces, key=lambda piece: piece.continued):
        for batch in batches(piece.text for piece in run):
            yield from tokenizer.encode(batch, parallel=parallel, continued=continued)


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the ids of each text, on all cores. Long texts are tokenised in pieces."""
    for batch in batches(texts):
        parts = [piece for text in batch for piece in pieces(blocks(text), tokenizer)]
        document: list[int] = []
        for piece, ids in zip(parts, encode_pieces(parts, tokenizer, parallel=True), strict=True):
            document += ids
            if piece.last:
                yield document
                document = []


def check_vocabulary(*, tokenizer: int, vocab_size: int, name: str, setting: str = "vocab_size") -> None:
    """Check that a model's vocabulary has every id of the tokenizer; it may be larger (padding).

    Raises:
        ValueError: it has not; names both sizes, and the setting to change.
    """
    if vocab_size < tokenizer:
        raise ValueError(f"{setting} {vocab_size} is smaller than the {tokenizer} pieces of the tokenizer of {name}")
