"""What of a text is predicted from what: documents cut into windows that predict every token exactly once.

A document of N + 1 tokens has N to predict, t_1 .. t_N; t_0 is context only. A window holds at most L of them as
inputs. Windows begin `stride` tokens apart, and each counts the tokens that the windows before it have not predicted:

    stride = L    windows do not overlap: after L tokens the context starts again
    stride < L    every token but a document's first L is predicted from at least L - stride before it

The last window of a document ends with it and may be shorter. No window holds tokens of two documents, and none is
padded: those that are computed together have equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens int64 [T + 1]: T inputs, and the T that follow them, of which the last `scored` count."""

    tokens: NDArray[np.int64]
    scored: int

    @property
    def inputs(self) -> int:
        return len(self.tokens) - 1


def cut(tokens: NDArray[np.int64], seq_len: int, stride: int) -> Iterator[Window]:
    """The windows of a document, t_0 .. t_N; none for fewer than two tokens."""
    last, predicted, begin = len(tokens) - 1, 0, 0
    while predicted < last:
        end = min(begin + seq_len, last)
        yield Window(tokens[begin : end + 1], end - predicted)
        predicted, begin = end, begin + stride


def of_equal_length(items: Iterable[T], count: int, length: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of at most `count` items of one length, as soon as they are full; what is left over comes last."""
    waiting: dict[int, list[T]] = {}
    for item in items:
        group = waiting.setdefault(length(item), [])
        group.append(item)
        if len(group) == count:
            yield waiting.pop(length(item))
    yield from waiting.values()


def check(*, seq_len: int, stride: int, batch: int, max_seq_len: int) -> None:
    """Raises ValueError for numbers that make no windows, or windows that the model has no positions for."""
    if not 1 <= seq_len <= max_seq_len:
        raise ValueError(f"windows of {seq_len} tokens: must be at least 1 and at most the model's {max_seq_len}")
    if not 1 <= stride <= seq_len:
        raise ValueError(f"a stride of {stride} must be at least 1, and at most the window's {seq_len} tokens")
    if batch < 1:
        raise ValueError(f"a batch of {batch} windows must be at least 1")
