"""Tokenising word by word, with a memory for words: the same ids in a third of the time, where that is exact.

SentencePiece's byte-pair encoding merges neighbours as long as the merged piece is in the vocabulary. Where no piece
holds a character followed by a space, and none holds a newline beside anything else, nothing is ever merged across the
beginning of a run of spaces or across a newline: the text between two of these is encoded by itself, whatever stands
around it. Words repeat, so most are looked up. That needs a model without a normaliser that looks at more than one
character, and bytes for what is not in its alphabet (runs of unknown characters would become one token).

Whether a model is so is read from its own description, a protocol buffer: a sequence of (number << 3 | wire type) and
value. The numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

_WORD = re.compile("[ \u2581]*[^ \u2581\n]+|\n|[ \u2581]+")  # U+2581 is how SentencePiece writes a space
_CROSSES = re.compile("[^ \u2581][ \u2581]|\n.|.\n", re.DOTALL)
_REMEMBERED = 500_000  # words, about 100 MB
_LONGEST = 32  # characters of a word that is remembered

_MODEL_TRAINER, _MODEL_NORMALISER = 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARACTERS_MAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_BPE = 2


class Words(dict[str, tuple[int, ...]]):
    """Ids of words, by `encode` where they are not known yet."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode(word))
        if len(word) <= _LONGEST and len(self) < _REMEMBERED:
            self[word] = ids
        return ids

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(chain.from_iterable(map(self.__getitem__, _WORD.findall(text))))


def separable(model: bytes, pieces: Iterable[str]) -> bool:
    """Whether words can be encoded one by one: `model` is a SentencePiece model with these pieces."""
    parts = dict(_fields(model))
    trainer, normaliser = (dict(_fields(_bytes(parts, part))) for part in (_MODEL_TRAINER, _MODEL_NORMALISER))
    return (
        trainer.get(_MODEL_TYPE) == _BPE
        and trainer.get(_BYTE_FALLBACK) == 1
        and not trainer.get(_SPACE_AS_SUFFIX, 0)
        and not normaliser.get(_CHARACTERS_MAP)
        and normaliser.get(_DUMMY_PREFIX, 1) == 0
        and normaliser.get(_REMOVE_SPACES, 1) == 0
        and normaliser.get(_ESCAPE_SPACES, 1) == 1
        and not any(map(_CROSSES.search, pieces))
    )


def _bytes(fields: dict[int, int | bytes], number: int) -> bytes:
    found = fields.get(number, b"")
    return found if isinstance(found, bytes) else b""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a protocol buffer's fields; integers for wire type 0, bytes for the others."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
