"""Position of a rank's shard in the whole parameter, and the ranks with the other shards.

    shape (6, 8), sharded by rows over 2 and by columns over 2: first (3, 4), local (3, 4) is the last of four shards

A per-tensor scale needs the amax of all shards, a mean needs their sums, and a random draw depends on the position of
its element in the whole tensor. With these, an update of a shard has the same bits as an update of the whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec_train.group import Group


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Position of this rank's shard of a parameter.

    shape: of the whole parameter. first: index of the shard's first element in it. local: shape of the shard; dimension
    0 may be empty on the last ranks. group: ranks with shards; None if the parameter is not sharded.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    local: tuple[int, ...]
    group: Group | None

    @property
    def origin(self) -> tuple[int, int]:
        """Row and column of the first element in the whole matrix."""
        row = 0
        for first, size in zip(self.first[:-1], self.shape[:-1], strict=True):
            row = row * size + first
        return row, self.first[-1]


def local(x: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; any other tensor unchanged."""
    if not isinstance(x, DTensor):
        return x
    (inner, *_), _ = x.__tensor_flatten__()  # `to_local` would make a view of a parameter's shard, an op a call
    return getattr(x, inner)
