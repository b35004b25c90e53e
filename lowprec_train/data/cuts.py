"""Long documents in pieces whose tokens, end to end, are those of the whole document.

A tokenizer takes 50 times the size of a text in memory, so no long document is tokenised at once. A cut between two
characters changes no token where no piece of the vocabulary holds the two as neighbours, so that no merge crosses it,
and where normaliser and pre-tokenizer do the same to either side as to the whole. Each kind of tokenizer knows such
places (`Tokenizer.cut`); every cut is also tried: text around it is tokenised whole and in two.

A text without such a place in `LONGEST` characters (one letter a million times), or of a tokenizer of which nothing
is known, is cut all the same, and the piece says so (`inexact`): tokens next to that cut can differ, the text is kept.
Where the cuts are depends on the text alone. Tokens of SentencePiece's unigram models can differ in ties without being
marked (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

PIECE = 1 << 18  # characters; a longer document is cut
LONGEST = 1 << 22  # characters without a place to cut, after which a piece ends anyway
CONTEXT = 128  # characters on either side of a cut that it is tried on
_TRIES = 500  # that fail, before a text counts as one without a place


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """A text, or a part of one. `continued`: goes on after a cut; `last`: ends the document.

    `inexact`: the cut at its end may have changed tokens.
    """

    text: str
    continued: bool = False
    last: bool = True
    inexact: bool = False


class Cutter(Protocol):
    """What knows where text may be cut: a tokenizer."""

    def cut(self, text: str) -> int | None:
        """The last place in a text that goes on, where a cut changes no token; None: there is none."""
        ...


def pieces(blocks: Iterable[str], cutter: Cutter, *, continued: bool = False) -> Iterator[TextSpan]:
    """The text that the blocks are end to end, in pieces; a short one in one piece, an empty one too.

    continued: the text goes on after a cut.
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
    """A text in blocks of the length of a piece."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def neighbours(texts: Iterable[str]) -> frozenset[str]:
    """All pairs of characters that stand next to each other in one of the texts."""
    return frozenset(text[at : at + 2] for text in texts for at in range(len(text) - 1))


def last_cut(
    text: str, may_cut: Callable[[str, str], bool], encode: Callable[[list[str]], list[list[int]]]
) -> int | None:
    """The last place between two characters of which `may_cut` says yes, and where a try agrees.

    `encode`: ids of texts that go on after a cut. `CONTEXT` characters at the end are left to be looked at.
    """
    candidates = (at for at in range(len(text) - CONTEXT, 0, -1) if may_cut(text[at - 1], text[at]))
    for at in islice(candidates, _TRIES):
        before, after = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
        whole, left, right = encode([before + after, before, after])
        if whole == left + right:
            return at
    return None
