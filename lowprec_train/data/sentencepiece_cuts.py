"""Places where a SentencePiece model may cut text, from the fields of the model's file that decide them.

A model merges (or chooses) pieces over the whole text, so the two sides of a cut are independent if no piece has the
last character of one and the first of the other. The normaliser must treat both sides as it treats the whole: the
identity does; one that composes characters, or drops runs of spaces, does so before a space that follows a letter or
digit of ASCII. The space that a model may put before a text (`add_dummy_prefix`) must not be put before the later
pieces, unless the model drops spaces at the beginning: then it replaces the dropped one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowprec_train.data.cuts import neighbours

_SPACE = "▁"  # a space within pieces
_COMPOSING = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # of SentencePiece; none of their rules has a space inside
_TRAINER, _NORMALIZER = 2, 3  # fields of the model
_MODEL_TYPE, _SUFFIX = 3, 24  # of the trainer's settings
_NAME, _CHARACTERS, _PREFIX, _REMOVE, _ESCAPE = 1, 2, 3, 4, 5  # of the normaliser's settings
_WORD = 3  # the model type that has words only
_PIECES, _TEXT, _KIND, _OF_USERS = 1, 1, 3, 4  # field of the model; fields of a piece; the kind searched in the text


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Decides whether text may be cut between two characters. `continuing`: the model for text after a cut.

    joined: neighbours inside of a piece. alphabet: characters that are pieces; unknown neighbours become one token;
    None: unknown ones are spelled in bytes. plain: the normaliser does not change text.
    """

    joined: frozenset[str]
    alphabet: frozenset[str] | None
    plain: bool
    continuing: bytes

    def __call__(self, left: str, right: str) -> bool:
        if not self.plain:
            return left.isascii() and left.isalnum() and right == " " and left.lower() + _SPACE not in self.joined
        left, right = left.replace(" ", _SPACE), right.replace(" ", _SPACE)
        known = self.alphabet is None or left in self.alphabet or right in self.alphabet
        return known and left + right not in self.joined

    @classmethod
    def of(cls, content: bytes, processor: Any) -> CutRule | None:
        """Return the rule of a model; None for one that has words only, marks ends of words, has its own normalisation
        rules, or drops spaces although some user-defined symbols have spaces.
        """
        model = dict(_fields(content))
        trainer, normalizer = dict(_fields(model[_TRAINER])), dict(_fields(model.get(_NORMALIZER, b"")))
        composing = bool(normalizer.get(_CHARACTERS))
        if trainer.get(_MODEL_TYPE) == _WORD or trainer.get(_SUFFIX) or not normalizer.get(_ESCAPE, 1):
            return None
        if composing and normalizer.get(_NAME, b"").decode() not in _COMPOSING:
            return None
        removes = bool(normalizer.get(_REMOVE, 1))
        if removes and any(_is_spaced_symbol(value) for number, value in _fields(content) if number == _PIECES):
            return None
        count = processor.get_piece_size()
        texts = [
            processor.id_to_piece(i) for i in range(count) if not (processor.is_control(i) or processor.is_byte(i))
        ]
        in_bytes = any(processor.is_byte(i) for i in range(count))
        # Settings at the end of the file override earlier ones: normalizer_spec { add_dummy_prefix: removes }
        continuing = content + bytes([_NORMALIZER << 3 | 2, 2, _PREFIX << 3, removes])
        return cls(
            joined=neighbours(texts) | neighbours(text.lower() for text in texts),
            alphabet=None if in_bytes else frozenset(text for text in texts if len(text) == 1),
            plain=not composing and not removes,
            continuing=continuing,
        )


def _is_spaced_symbol(piece: bytes) -> bool:
    if piece[-2:] != bytes([_KIND << 3, _OF_USERS]):  # the last field, checked first: most pieces are of other kinds
        return False
    text = dict(_fields(piece))[_TEXT].decode()
    return " " in text or _SPACE in text


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protocol buffer message: integers, and bytes of all others."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if (kind := tag & 7) == 0:
            value: Any
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = message[at : at + size], at + size
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
