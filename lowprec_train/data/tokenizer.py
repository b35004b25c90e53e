"""The tokenizer interface, and reading a tokenizer from a file.

Two kinds are known: SentencePiece models (`sentencepiece_model`), which `lowprec train-tokenizer` learns, and
`tokenizer.json` files of Hugging Face's library (`huggingface`). Each has an end-of-document token, which closes every
document, and each stores itself as files: whoever finds those files (beside prepared data, or in an exported model)
reads the same tokenizer from them.
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

FILES = (HuggingFaceTokenizer.file_name, SentencePieceTokenizer.file_name)  # of a directory that has both, the first
_AT_ONCE = 256  # documents handed to a tokenizer together


class Tokenizer(Protocol):
    """Text to token ids and back; ids are below `vocab_size`, `eod` closes a document."""

    vocab_size: int
    eod: int

    @property
    def file_name(self) -> str:
        """The file that `load` reads."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Contents by name of the files to store, `file_name` among them."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the ids, except `versions`."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """Version of the library that computes the ids, by the name of the library."""
        ...

    def encode(self, texts: list[str], *, parallel: bool = True, continued: bool = False) -> list[list[int]]:
        """Token ids of each text, without an end-of-document token; on all cores, or with `parallel` False on one.

        continued: the texts go on after a cut.
        """
        ...

    def cut(self, text: str) -> int | None:
        """The last place in a text that goes on, where a cut changes no token; None: there is none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids."""
        ...


def load(path: str | Path, eod: str | None = None) -> Tokenizer:
    """The tokenizer in this file, of the kind that its content has; in a directory, `tokenizer.json` or else `.model`.

    `eod` names the token that closes documents; None: the tokenizer's own, as its kind finds it.

    Raises:
        ValueError: there is no such file, it is of neither kind, it has no such token or none that closes documents, or
            the package that reads it is not installed.
    """
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
    """Write the tokenizer's files, each whole or not at all and on disk; returns the path that `load` takes.

    Raises:
        ValueError: another tokenizer lies there.
        OSError: a file cannot be written, with its path.
    """
    others = [directory / name for name in FILES if name not in tokenizer.files and (directory / name).exists()]
    if others:
        raise ValueError(f"{others[0]}: another tokenizer lies there; a directory has one tokenizer, choose another")
    for name, content in tokenizer.files.items():
        path = directory / name
        if not path.exists():
            write_whole(path, content, shared=True)
        elif path.read_bytes() != content:
            raise ValueError(f"{path}: another tokenizer lies there; a directory has one tokenizer, choose another")
    return directory / tokenizer.file_name


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in lists of a length that suits `Tokenizer.encode`."""
    remaining = iter(texts)
    while batch := list(islice(remaining, _AT_ONCE)):
        yield batch


def encode_pieces(pieces: Iterable[TextSpan], tokenizer: Tokenizer, *, parallel: bool = False) -> Iterator[list[int]]:
    """Ids of each piece of documents."""
    for continued, run in groupby(pieces, key=lambda piece: piece.continued):
        for batch in batches(piece.text for piece in run):
            yield from tokenizer.encode(batch, parallel=parallel, continued=continued)


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of each text, which is never tokenised whole where it is long; on all cores."""
    for batch in batches(texts):
        parts = [piece for text in batch for piece in pieces(blocks(text), tokenizer)]
        document: list[int] = []
        for piece, ids in zip(parts, encode_pieces(parts, tokenizer, parallel=True), strict=True):
            document += ids
            if piece.last:
                yield document
                document = []


def check_vocabulary(*, tokenizer: int, vocab_size: int, name: str, setting: str = "vocab_size") -> None:
    """A model's vocabulary must hold every id of the tokenizer; it may be larger (padding).

    Raises:
        ValueError: it does not; names both sizes, and the setting to change.
    """
    if vocab_size < tokenizer:
        raise ValueError(f"{setting} {vocab_size} is smaller than the {tokenizer} pieces of the tokenizer of {name}")
