"""Cut documents into windows that predict every token exactly once.

In a document of N + 1 tokens, t_1 .. t_N are predicted and t_0 is context only. A window has at most L input tokens.
Windows begin `stride` tokens apart, and a window scores the tokens that no earlier window has predicted:

    stride = L    windows do not overlap: after L tokens the context starts again
    stride < L    every token but a document's first L is predicted from at least L - stride before it

The last window ends at the end of the document and may be shorter. No window has tokens of two documents. Windows are
not padded: the windows of a batch have equal lengths.
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
    """Consecutive token ids, int64 [T + 1]: T inputs and their T targets. The last `scored` targets are scored."""

    tokens: NDArray[np.int64]
    scored: int

    @property
    def inputs(self) -> int:
        return len(self.tokens) - 1


def cut(tokens: NDArray[np.int64], seq_len: int, stride: int) -> Iterator[Window]:
    """The windows of a document t_0 .. t_N. A document with fewer than two tokens has none."""
    last, predicted, begin = len(tokens) - 1, 0, 0
    while predicted < last:
        end = min(begin + seq_len, last)
        yield Window(tokens[begin : end + 1], end - predicted)
        predicted, begin = end, begin + stride


def of_equal_length(items: Iterable[T], count: int, length: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items of equal length, at most `count` per group. Full groups come first, incomplete groups at the end."""
    waiting: dict[int, list[T]] = {}
    for item in items:
        group = waiting.setdefault(length(item), [])
        group.append(item)
        if len(group) == count:
            yield waiting.pop(length(item))
    yield from waiting.values()


def check(*, seq_len: int, stride: int, batch: int, max_seq_len: int) -> None:
    """Raises ValueError for a window length, stride or batch size out of range."""
    if not 1 <= seq_len <= max_seq_len:
        raise ValueError(f"--seq-len {seq_len} must lie between 1 and the model's max_seq_len {max_seq_len}")
    if not 1 <= stride <= seq_len:
        raise ValueError(f"--stride {stride} must lie between 1 and the window length {seq_len}")
    if batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1")
