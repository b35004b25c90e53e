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

    def table(self) -> tuple[list[int], list[int]]:
        """Sizes of the ranges, and which of them are coded, 1 or 0: as ops take them."""
        return [each.size for each in self.ranges], [int(each.coded) for each in self.ranges]

    @classmethod
    def plain(cls, size: int) -> FlatLayout:
        """A row of one range that is not coded."""
        return cls((ElementRange(size, coded=False),))

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """rows [..., size] cut at the ranges' boundaries, as views."""
        return rows.split([each.size for each in self.ranges], dim=-1)

    def split(self, ranks: int, block: int) -> FlatLayout:
        """The row of one of `ranks` ranks when each takes an equal part of every range, coded ones by whole blocks."""
        parts = (ElementRange(-(-each.size // ranks), each.coded) for each in self.ranges)
        return FlatLayout(tuple(ElementRange(part.padded(block), part.coded) for part in parts))


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
