"""The grid of processes, with three axes.

    dp_replicate    replicas of everything below; gradients are summed between them (hybrid sharding)
    dp_shard        equal shards of parameters, gradients and optimizer states, gathered to compute (ZeRO)
    tp              parts of a layer and of a sequence, on the GPUs that are closest to each other

Rank = (replicate * dp_shard + shard) * tp + part, so tensor-parallel ranks are neighbours. The DeviceMesh orders the
same ranks as (dp_replicate, tp, dp_shard): a weight is divided over tp first and each part over dp_shard. A DTensor
represents this order with plain shards, from left to right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lowprec_train.comm.nodes import Nodes

AXES = ("dp_replicate", "tp", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Processes along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Processes that train on different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        return self.dp * self.tp


def sizes(processes: int, *, dp_replicate: int, dp_shard: int, tp: int) -> Sizes:
    """Return the grid of `processes` ranks; dp_shard=-1 is set to what the other axes leave.

    Raises ValueError for an axis that is not positive and for a product that is not the number of processes.
    """
    settings = f"parallel.dp_replicate={dp_replicate}, parallel.dp_shard={dp_shard}, parallel.tp={tp}"
    if min(dp_replicate, tp) < 1 or (dp_shard < 1 and dp_shard != -1):
        raise ValueError(f"{settings}: each must be at least 1; dp_shard=-1 takes what the others leave")
    if dp_shard == -1:
        if processes % (dp_replicate * tp):
            raise ValueError(f"{settings}: {dp_replicate} * {tp} does not divide {processes} processes")
        dp_shard = processes // (dp_replicate * tp)
    made = Sizes(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    if made.processes != processes:
        raise ValueError(f"{settings} need {made.processes} processes, and {processes} were started")
    return made


class Mesh:
    """The grid with its process groups. All ranks create it together, after `init_process_group`.

    device_type: "cuda" or "cpu". timeout: of collectives of its groups; None: torch's default of half an hour.
    node_size: processes per node; None: all of them. Raises ValueError if `sizes` do not multiply to the number of
    processes.
    """

    def __init__(
        self, sizes: Sizes, device_type: str, timeout: timedelta | None = None, node_size: int | None = None
    ) -> None:
        if sizes.processes != dist.get_world_size():
            raise ValueError(f"{sizes} are {sizes.processes} processes, and {dist.get_world_size()} were started")
        self.sizes, self.rank = sizes, dist.get_rank()
        grid = torch.arange(sizes.processes, device="cpu").view(sizes.dp_replicate, sizes.dp_shard, sizes.tp)
        ordered = grid.transpose(1, 2).contiguous()
        # DeviceMesh makes its groups without a timeout and, on GPUs, with gloo sockets to all their ranks beside NCCL.
        backend = "nccl" if device_type == "cuda" else None
        made = [_group(groups_along(sizes, axis), timeout, backend) for axis in AXES]
        self.device_mesh = DeviceMesh.from_group(made, device_type, ordered, mesh_dim_names=AXES)
        self.dp_group = self._data_group(grid, timeout, backend)
        on_node = sizes.processes if node_size is None else _common_node_size(node_size)
        self._nodes = {
            name: _by_node(made[AXES.index(name)], groups_along(sizes, name), on_node, timeout, backend)
            for name in ("dp_replicate", "dp_shard")
        }

    def _data_group(self, grid: torch.Tensor, timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup:
        """Return the group of the ranks that train on different data: that of an axis, if the axis has them all."""
        for axis, other in (("dp_shard", self.sizes.dp_replicate), ("dp_replicate", self.sizes.dp_shard)):
            if other == 1:
                return self.group(axis)
        return _group(grid.flatten(0, 1).t(), timeout, backend)

    @property
    def dp_rank(self) -> int:
        """Index of this rank among the ranks that train on different data."""
        return self.rank // self.sizes.tp

    @property
    def tp_rank(self) -> int:
        """Index of this rank among the ranks that have the parts of a layer."""
        return self.rank % self.sizes.tp

    @property
    def shard_rank(self) -> int:
        """Index of this rank along dp_shard."""
        return self.dp_rank % self.sizes.dp_shard

    def axis(self, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of this rank along an axis."""
        return self.device_mesh[name]

    def nodes(self, name: str) -> Nodes:
        """Return the group of dp_replicate or dp_shard, with its ranks by node."""
        return self._nodes[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis."""
        return self.device_mesh.get_group(name)


def groups_along(sizes: Sizes, axis: str) -> torch.Tensor:
    """Return the ranks of every group along an axis, [groups, ranks]."""
    grid = torch.arange(sizes.processes, device="cpu").view(sizes.dp_replicate, sizes.dp_shard, sizes.tp)
    return grid.transpose(1, 2).movedim(AXES.index(axis), -1).flatten(0, 1)


def node_ranks(groups: torch.Tensor, node_size: int) -> int | None:
    """Return the number of a group's ranks per node, if it is the same for all nodes and groups; else None.

    groups: [groups, ranks], with a node's ranks next to each other.
    """
    nodes = groups // node_size
    count = int((nodes[0] == nodes[0, 0]).sum())
    if nodes.shape[1] % count:
        return None
    parts = nodes.unflatten(1, (-1, count))
    within, first = bool((parts == parts[..., :1]).all()), parts[..., 0]
    return count if within and bool((first[:, 1:] != first[:, :-1]).all()) else None


def check_nodes(sizes: Sizes, node_size: int | None) -> None:
    """Raise ValueError if `comm.node_size` does not divide the processes, or if nodes differ in ranks of an axis."""
    if node_size is None:
        return
    if sizes.processes % node_size:
        raise ValueError(f"comm.node_size={node_size} does not divide {sizes.processes} processes")
    for axis in ("dp_shard", "dp_replicate"):
        found = groups_along(sizes, axis)
        if node_ranks(found, node_size) is None:
            ranks = found.shape[1]
            raise ValueError(
                f"comm.node_size={node_size}: the {ranks} ranks of {axis} do not spread evenly over the nodes"
            )


def _common_node_size(node_size: int) -> int:
    """Return the node size of all ranks; 1 if a launcher has started unequal numbers, which only some ranks see."""
    seen = torch.tensor([node_size, -node_size], device="cpu")
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    largest, smallest = int(seen[0]), -int(seen[1])
    return largest if largest == smallest else 1


def _by_node(
    group: dist.ProcessGroup, groups: torch.Tensor, node_size: int, timeout: timedelta | None, backend: str | None
) -> Nodes:
    """Return the ranks by node; if they spread unevenly, each rank counts as a node. All ranks call it together."""
    node, ranks = node_ranks(groups, node_size) or 1, groups.shape[1]
    if not 1 < node < ranks:
        return Nodes(whole=group, node=node)
    inside = _group(groups.reshape(-1, node), timeout, backend)
    across = _group(groups.unflatten(1, (-1, node)).transpose(1, 2).flatten(0, 1), timeout, backend)
    return Nodes(whole=group, node=node, inside=inside, across=across)


def _group(rows: Iterable[torch.Tensor], timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup:
    """Create a group per row of ranks and return this rank's. All ranks create all groups, in the same order."""
    own = None
    for row in rows:
        ranks = row.tolist()
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own
