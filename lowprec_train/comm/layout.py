"""Where each parameter lies in a flat gradient buffer, and which of them travel as codes.

A sharded reduction sums a buffer of `ranks` rows; row r is what rank r will own. Every row holds a shard of every
parameter, in the same order and of the same size (this is how `fully_shard` fills the input of its reduce-scatter):

    row r = [shard r of parameter 0 | shard r of parameter 1 | ...]        flat = [row 0 | row 1 | ...]

A FlatLayout lists the shards of one row as ranges. Scale blocks are counted from the start of a range and the last one
is filled up with zeros, so a block lies within one row and one parameter: a large neighbour in the same block would
wipe a small gradient out. Vectors are few bytes and the most sensitive; their ranges are not coded and travel in BF16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ElementRange:
    """`size` consecutive elements of one parameter; `coded` ones take a block-scaled format where the codec has one.

    Raises ValueError for a size below 1.
    """

    size: int
    coded: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a range has at least one element, not {self.size}")

    def padded(self, block: int) -> int:
        """Elements on the wire: whole blocks when coded."""
        return -(-self.size // block) * block if self.coded else self.size


@dataclass(frozen=True)
class FlatLayout:
    """The ranges of one row, in order. Raises ValueError when there is none."""

    ranges: tuple[ElementRange, ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a layout has at least one range")

    @property
    def size(self) -> int:
        """Elements of a row."""
        return sum(each.size for each in self.ranges)

    @property
    def coded_size(self) -> int:
        """Elements of a row that travel as codes."""
        return sum(each.size for each in self.ranges if each.coded)

    def padded_size(self, coded: bool, block: int) -> int:
        """Elements on the wire of the coded or the other ranges of a row."""
        return sum(each.padded(block) for each in self.ranges if each.coded == coded)

    @classmethod
    def plain(cls, size: int) -> FlatLayout:
        """A row of one range that is not coded."""
        return cls((ElementRange(size, coded=False),))

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """rows [n, size] cut at the ranges' boundaries, as views."""
        return rows.split([each.size for each in self.ranges], dim=1)

    def columns(self, rows: Tensor, coded: bool, block: int) -> Tensor:
        """The coded or the other ranges of rows [n, size] side by side, zeros up to whole blocks: [n, padded_size].

        A view when nothing has to be moved.
        """
        chosen = [
            F.pad(piece, (0, each.padded(block) - each.size)) if each.padded(block) > each.size else piece
            for each, piece in zip(self.ranges, self.pieces(rows))
            if each.coded == coded
        ]
        if len(chosen) == len(self.ranges) and self.padded_size(coded, block) == self.size:
            return rows
        return torch.cat(chosen, dim=1) if chosen else rows[:, :0]

    def merge(self, coded: Tensor, plain: Tensor, block: int) -> Tensor:
        """Rows [n, size] from what `columns` took apart."""
        parts, starts = [], {True: 0, False: 0}
        for each in self.ranges:
            start = starts[each.coded]
            parts.append((coded if each.coded else plain)[:, start : start + each.size])
            starts[each.coded] += each.padded(block)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def split(self, ranks: int, block: int) -> FlatLayout:
        """The row of one of `ranks` ranks when each takes an equal part of every range, coded ones by whole blocks."""
        parts = (ElementRange(-(-each.size // ranks), each.coded) for each in self.ranges)
        return FlatLayout(tuple(ElementRange(part.padded(block), part.coded) for part in parts))

    def scatter(self, flat: Tensor, ranks: int, block: int) -> Tensor:
        """flat [size] as rows [ranks, split(ranks).size], zeros after the end of each range."""
        parts = zip(self.ranges, self.split(ranks, block).ranges, self.pieces(flat[None]))
        filled = [F.pad(piece[0], (0, ranks * part.size - whole.size)) for whole, part, piece in parts]
        return torch.cat([piece.view(ranks, -1) for piece in filled], dim=1)

    def gather(self, rows: Tensor, block: int) -> Tensor:
        """The inverse of `scatter`: flat [size]."""
        pieces = self.split(rows.shape[0], block).pieces(rows)
        return torch.cat([piece.reshape(-1)[: whole.size] for whole, piece in zip(self.ranges, pieces)])

    def chunks(self, limit: int) -> list[FlatLayout]:
        """Consecutive layouts of at most `limit` elements each; ranges are cut at multiples of `limit` only.

        Blocks stay whole when they divide `limit`, so cutting a message changes no bit of the result.
        """
        groups: list[list[ElementRange]] = [[]]
        for part in (part for whole in self.ranges for part in _cut(whole, limit)):
            if groups[-1] and sum(each.size for each in groups[-1]) + part.size > limit:
                groups.append([])
            groups[-1].append(part)
        return [FlatLayout(tuple(group)) for group in groups]


def _cut(whole: ElementRange, limit: int) -> list[ElementRange]:
    sizes = [limit] * (whole.size // limit) + [whole.size % limit]
    return [ElementRange(size, whole.coded) for size in sizes if size]


def sharded_layout(shapes: Mapping[str, Sequence[int]], ranks: int = 1, exclude: Sequence[str] = ()) -> FlatLayout:
    """The row that `fully_shard` makes of these parameters on `ranks` ranks: dimension 0 in equal parts, rounded up.

    With one rank, the layout of the parameters' concatenation.

    Args:
        shapes: name -> shape of each whole parameter, in the order of the buffer.
        ranks: number of rows of the buffer.
        exclude: patterns (`*.embedding.*`) of names that travel in BF16 although they are matrices.

    Raises ValueError where there is no parameter.
    """
    ranges = []
    for name, shape in shapes.items():
        coded = len(shape) >= 2 and not any(fnmatchcase(name, pattern) for pattern in exclude)
        first = shape[0] if shape else 1
        ranges.append(ElementRange(-(-first // ranks) * math.prod(shape[1:]), coded))
    return FlatLayout(tuple(ranges))
