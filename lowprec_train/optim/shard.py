"""Where one rank's shard of a parameter lies in the whole, and which ranks hold the rest, as data.

    shape (6, 8), sharded by rows over 2 and by columns over 2: first (3, 4), local (3, 4) is the last of four shards

A scale of the whole tensor needs the amax of all shards, a mean needs their sums, a draw the place of its element in
the whole: with these an optimizer that holds one shard computes the bits of one that holds everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec_train.group import Group


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Where this rank's shard of a parameter lies in the whole.

    shape: of the whole. first: index there of the shard's first element. local: shape of the shard; dimension 0 may be
    empty on the last ranks. group: the ranks that hold the shards; None where this rank holds the whole.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    local: tuple[int, ...]
    group: Group | None

    @property
    def origin(self) -> tuple[int, int]:
        """Row and column of the first element in the whole as a matrix."""
        row = 0
        for first, size in zip(self.first[:-1], self.shape[:-1], strict=True):
            row = row * size + first
        return row, self.first[-1]


def local(x: Tensor) -> Tensor:
    """What this rank has of x: the shard of a DTensor, sharing its memory; anything else as it is."""
    if not isinstance(x, DTensor):
        return x
    (inner, *_), _ = x.__tensor_flatten__()  # `to_local` would make a view of a parameter's shard, an op a call
    shard: Tensor = getattr(x, inner)
    return shard
