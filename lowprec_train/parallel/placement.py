"""The placement of every parameter: which part of it this rank has. It cuts tensors at the start and joins them in
checkpoints.

A matrix may be divided over tp along one of its dimensions. The rows of each part are then divided over dp_shard as
torch.chunk does, uneven and empty parts included. Vectors are whole on every rank.
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
    """One parameter. shape: of the whole; tp: dimension divided over tp; sharded: rows are divided over dp_shard."""

    shape: tuple[int, ...]
    tp: int | None
    sharded: bool


@dataclass(frozen=True)
class Placements:
    """All parameters of a model, by fully qualified name, on one mesh."""

    mesh: Mesh
    parameters: Mapping[str, Placed]

    def shard(self, name: str, group: Group | None) -> Shard:
        """Return this rank's shard of parameter `name`. group: the ranks that have the shards, if it is divided."""
        placed = self.parameters[name]
        first, local = self._within(placed)
        return Shard(shape=placed.shape, first=first, local=local, group=group if self._cut(placed) else None)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor with the whole shape of parameter `name`, as a view."""
        first, local = self._within(self.parameters[name])
        for dim, (start, size) in enumerate(zip(first, local, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    def whole(self, name: str, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
        """Return this rank's part as a DTensor over the mesh that shares its memory. shape: of the whole, if the tensor
        lies along the parameter but has another shape (scales of groups).
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
