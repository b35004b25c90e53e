"""Which part of every parameter this rank holds, as data: what cuts tensors at the start and joins them in checkpoints.

A matrix is cut over tp along one of its dimensions, or not; then the rows of each part are cut over dp_shard as
torch.chunk cuts them, uneven and empty parts included. Vectors are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as SplitDim
from torch.distributed.tensor.placement_types import Placement

from lowprec_train.group import Group
from lowprec_train.optim.shard import Shard
from lowprec_train.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One parameter. shape: of the whole; tp: the dimension that is cut over tp; sharded: rows cut over dp_shard."""

    shape: tuple[int, ...]
    tp: int | None
    sharded: bool


@dataclass(frozen=True)
class Placements:
    """All parameters of a model, by fully qualified name, on one mesh."""

    mesh: Mesh
    parameters: Mapping[str, Placed]

    def shard(self, name: str, group: Group | None) -> Shard:
        """Where this rank's part of parameter `name` lies. group: the ranks that hold the shards, where it is cut."""
        placed = self.parameters[name]
        first, local = self._within(placed)
        return Shard(shape=placed.shape, first=first, local=local, group=group if self._cut(placed) else None)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of parameter `name`'s whole shape, as a view."""
        first, local = self._within(self.parameters[name])
        for dim, (start, size) in enumerate(zip(first, local, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    def whole(self, name: str, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
        """This rank's part as a DTensor over the mesh, sharing its memory. shape: of the whole, where the tensor goes
        with the parameter without having its shape (scales of groups).
        """
        placed = self.parameters[name]
        shape = placed.shape if shape is None else shape
        stride = torch.empty(shape, device="meta").stride()
        placements = (Replicate(), *self._placements(placed))
        return DTensor.from_local(
            local, self.mesh.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _placements(self, placed: Placed) -> tuple[Placement, Placement]:
        tp: Placement = Replicate() if placed.tp is None else SplitDim(placed.tp)
        return tp, SplitDim(0) if placed.sharded else Replicate()

    def _cut(self, placed: Placed) -> bool:
        sizes = self.mesh.sizes
        return (placed.tp is not None and sizes.tp > 1) or (placed.sharded and sizes.dp_shard > 1)

    def _within(self, placed: Placed) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first, local = [0] * len(placed.shape), list(placed.shape)
        sizes = self.mesh.sizes
        if placed.tp is not None:
            local[placed.tp] //= sizes.tp
            first[placed.tp] = self.mesh.tp_rank * local[placed.tp]
        if placed.sharded:
            rows = -(-local[0] // sizes.dp_shard)
            start = min(self.mesh.shard_rank * rows, local[0])
            first[0], local[0] = first[0] + start, min(rows, local[0] - start)
        return tuple(first), tuple(local)
