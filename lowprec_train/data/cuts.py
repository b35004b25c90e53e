"""Split long documents into pieces whose concatenated tokens are those of the whole document.

A tokenizer needs 50 times the size of a text in memory, so a long document is not tokenised at once. A cut between two
characters changes no token if no piece of the vocabulary has the two as neighbours, so that no merge crosses the cut,
and if normaliser and pre-tokenizer treat either side as they treat the whole. Each kind of tokenizer finds such places
(`Tokenizer.cut`). Every cut is also tested: the text around it is tokenised whole and in two parts.

A text without such a place in `LONGEST` characters (one letter a million times), or with a tokenizer of unknown parts,
is cut anyway, and the piece is marked `inexact`: tokens next to that cut may differ, the text does not. Cuts depend on
the text alone. Ties in SentencePiece's unigram models may change tokens without a mark (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

PIECE = 1 << 18  # characters; a longer document is cut
LONGEST = 1 << 22  # characters without a place to cut, after which a piece ends anyway
CONTEXT = 128  # characters on either side of a cut that test it
_TRIES = 500  # failed tests, after which a text counts as one without a place


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A text or a part of one. `continued`: follows a cut; `last`: ends the document.

    `inexact`: the cut at its end may have changed tokens.
    """

    text: str
    continued: bool = False
    last: bool = True
    inexact: bool = False


class Cutter(Protocol):
    """Finds the places where text may be cut: a tokenizer."""

    def cut(self, text: str) -> int | None:
        """Return the last place in an unfinished text where a cut changes no token; None if there is none."""


def pieces(blocks: Iterable[str], cutter: Cutter, *, continued: bool = False) -> Iterator[TextSpan]:
    """Yield the concatenated blocks in pieces; a short or empty text is one piece.

    continued: the text follows a cut.
    """
    held, size = "", PIECE
    for block in blocks:
        held += block
        while len(held) > size:
            at = cutter.cut(held[:size])
            if at is None and size < LONGEST:
                size = min(2 * size, LONGEST)
                continue
            yield TextSpan(text=held[: at or size], continued=continued, last=False, inexact=at is None)
            held, size, continued = held[at or size :], PIECE, True
    yield TextSpan(text=held, continued=continued)


def blocks(text: str) -> Iterator[str]:
    """Yield a text in blocks of the length of a piece."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def neighbours(texts: Iterable[str]) -> frozenset[str]:
    """Return all pairs of adjacent characters in the texts."""
    return frozenset(text[at : at + 2] for text in texts for at in range(len(text) - 1))


def last_cut(
    text: str, may_cut: Callable[[str, str], bool], encode: Callable[[list[str]], list[list[int]]]
) -> int | None:
    """Return the last place that `may_cut` allows and a test confirms; None if there is none.

    `encode`: ids of texts that follow a cut. The last `CONTEXT` characters are only used in tests.
    """
    candidates = (at for at in range(len(text) - CONTEXT, 0, -1) if may_cut(text[at - 1], text[at]))
    for at in islice(candidates, _TRIES):
        before, after = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
        whole, left, right = encode([before + after, before, after])
        if whole == left + right:
            return at
    return None
