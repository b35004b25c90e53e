"""The layout of parameters in a flat gradient buffer, and which of them are sent as codes.

A sharded reduction sums a buffer of `ranks` rows; rank r gets the sum of row r. Every row has a shard of every
parameter, in the same order and of the same size (`fully_shard` fills the input of its reduce-scatter like this):

    row r = [shard r of parameter 0 | shard r of parameter 1 | ...]        flat = [row 0 | row 1 | ...]

A FlatLayout lists the shards of one row as ranges. Scale blocks start at the start of a range, and the last block is
padded with zeros, so a block lies within one row and one parameter: a large neighbour in the same block would erase a
small gradient. Vectors are few bytes and the most sensitive, so they are not coded: they are sent in BF16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor


@dataclass(frozen=True)
class ElementRange:
    """`size` consecutive elements of one parameter; `coded` ones are in the codec's block-scaled format, if it has one.

    Raises ValueError for a size below 1.
    """

    size: int
    coded: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a range has at least one element, not {self.size}")

    def padded(self, block: int) -> int:
        """Return the number of elements on the wire: whole blocks if coded."""
        return -(-self.size // block) * block if self.coded else self.size


@dataclass(frozen=True)
class FlatLayout:
    """The ranges of one row, in order. Raises ValueError if there are none."""

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
        """Elements of a row that are sent as codes."""
        return sum(each.size for each in self.ranges if each.coded)

    def table(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the ranges, and 1 or 0 for coded or not, as ops take them."""
        return [each.size for each in self.ranges], [int(each.coded) for each in self.ranges]

    @classmethod
    def plain(cls, size: int) -> FlatLayout:
        """Return a row of one range that is not coded."""
        return cls((ElementRange(size, coded=False),))

    def pieces(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows [..., size] at the ranges' boundaries, as views."""
        return rows.split([each.size for each in self.ranges], dim=-1)

    def split(self, ranks: int, block: int) -> FlatLayout:
        """Return the row of one rank if `ranks` ranks get equal parts of every range; coded ones get whole blocks."""
        parts = (ElementRange(-(-each.size // ranks), each.coded) for each in self.ranges)
        return FlatLayout(tuple(ElementRange(part.padded(block), part.coded) for part in parts))


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a matrix is sent in BF16 because a pattern (`*.embedding.*`) names it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def sharded_layout(shapes: Mapping[str, Sequence[int]], ranks: int = 1, exclude: Sequence[str] = ()) -> FlatLayout:
    """Return the row that `fully_shard` makes of these parameters: dimension 0 in equal parts, rounded up.

    With one rank, it is the layout of the concatenated parameters.

    Args:
        shapes: name -> shape of each whole parameter, in the order of the buffer.
        ranks: number of rows of the buffer.
        exclude: patterns (`*.embedding.*`) of names of matrices that are sent in BF16.

    Raises ValueError if there is no parameter.
    """
    ranges = []
    for name, shape in shapes.items():
        coded = len(shape) >= 2 and not excluded(name, exclude)
        first = shape[0] if shape else 1
        ranges.append(ElementRange(-(-first // ranks) * math.prod(shape[1:]), coded))
    return FlatLayout(tuple(ranges))
