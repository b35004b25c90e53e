"""Maxima and sums over the ranks that hold the pieces of one tensor (`optim.piece.Holders` on process groups).

A tensor cut over two axes of the mesh has holders along both: numbers go over one axis and then over the other. Maxima
are left to the network, for their order does not matter. Sums are gathered and added here in rank order: the same bits
on every rank, with any library and any algorithm. They are meant for a few numbers a tensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class GroupHolders:
    """The ranks of the product of some process groups. Equal where the groups are: their numbers travel together."""

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        self._groups = groups
        self._names = tuple(group.group_name for group in groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupHolders) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks, NaN counting as infinity; x is overwritten."""
        x = x.masked_fill_(x.isnan(), torch.inf)
        for group in self._groups:
            dist.all_reduce(x, dist.ReduceOp.MAX, group)
        return x

    def total(self, x: Tensor) -> Tensor:
        """The elementwise sum over ranks, in rank order, in x's dtype."""
        for group in self._groups:
            rows = list(x.new_empty((group.size(), *x.shape)).unbind())
            dist.all_gather(rows, x.contiguous(), group)
            x = rows[0]
            for each in rows[1:]:
                x = x + each
        return x
