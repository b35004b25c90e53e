"""Process groups as `group.Group`, and products of groups.

The communication library computes maxima, because their order does not matter. Sums are computed here: every rank sends
its contribution (a reduce-scatter uses an all-to-all, which sends the same bytes), and the receiver adds in rank order.
The result depends neither on the library nor on its algorithm: a ring that adds BF16 rounds at every hop.

Collectives are PyTorch's functional operations, which take the name of their group: they run eagerly and inside a graph
of torch.compile, on gloo and on NCCL. They have no public name (decision 0017).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.group import Group, nan_as_infinity, sum_in_order

_c10d = torch.ops._c10d_functional
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # one call, renamed in torch 2.13


def all_gather_each(pairs: Iterable[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """All-gather several tensors in one collective: (gathered, shard), of any dtypes, contiguous. The current stream
    waits for it.
    """
    with dist._coalescing_manager(group=group):
        for gathered, shard in pairs:
            ALL_GATHER(gathered.view(-1).view(torch.uint8), shard.view(-1).view(torch.uint8), group=group)


def all_to_all_each(pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Exchange several tensors: (arrived, sent), contiguous, an equal part of each for every rank. NCCL does it in one
    collective, for which the current stream waits.
    """
    device = pairs[0][0].device
    together = device.type == "cuda" and len(pairs) > 1
    with dist._coalescing_manager(group=group, device=device) if together else nullcontext():
        for arrived, sent in pairs:
            dist.all_to_all_single(arrived, sent, group=group)


@dataclass(frozen=True)
class DistributedGroup:
    """The ranks of a process group: their number, this rank's number, and the group's name."""

    size: int
    rank: int
    name: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> DistributedGroup:
        """Wrap `group`, to which this process belongs; None: the default group."""
        group = group or dist.group.WORLD
        assert group is not None
        return cls(group.size(), group.rank(), group.group_name)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return _arrived(_c10d.all_reduce(nan_as_infinity(x), "max", self.name))

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(x[None]).unbind())

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        """Gather x. Codes are sent as bytes: gloo has no FP8."""
        wire = x.detach().contiguous()
        wire = wire.view(torch.uint8) if x.element_size() == 1 else wire
        gather = torch.ops.lowprec_comm.all_gather_again if repeatable else _all_gathered
        parts = gather(wire, self.size, self.name).view(x.dtype)
        return parts if dim == 0 else parts.unflatten(0, (self.size, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = [x.shape[0] // self.size] * self.size
        return sum_in_order(_arrived(_c10d.all_to_all_single(x.contiguous(), rows, rows, self.name)).split(rows))


@dataclass(frozen=True, init=False)
class GroupProduct:
    """The ranks of a grid, with one group per axis: collectives run over one axis after the other. Rank r of the
    product is rank r % n of the first group, which has n ranks, and so on.
    """

    groups: tuple[Group, ...]

    def __init__(self, *groups: Group) -> None:
        object.__setattr__(self, "groups", groups)

    @property
    def size(self) -> int:
        return math.prod(group.size for group in self.groups)

    @property
    def rank(self) -> int:
        place = 0
        for group in reversed(self.groups):
            place = place * group.size + group.rank
        return place

    def all_reduce_max(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group.all_reduce_max(x)
        return x

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group.all_reduce_sum(x)
        return x

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        for group in self.groups:
            x = group.all_gather(x, dim, repeatable=repeatable)
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter over one axis after the other; rounds once per axis."""
        for group in reversed(self.groups):
            x = group.reduce_scatter(x)
        return x


def _arrived(x: Tensor) -> Tensor:
    """Return x after the device's stream has waited for it."""
    return _c10d.wait_tensor(x)


def _all_gathered(x: Tensor, size: int, group: str) -> Tensor:
    return _arrived(_c10d.all_gather_into_tensor(x, size, group))


_LIBRARY = torch.library.Library("lowprec_comm", "DEF")
_LIBRARY.define("all_gather_again(Tensor x, int size, str group) -> Tensor")
_LIBRARY.impl("all_gather_again", _all_gathered, "CompositeExplicitAutograd")
torch.library.register_fake(
    "lowprec_comm::all_gather_again", lambda x, size, group: x.new_empty((size * x.shape[0], *x.shape[1:]))
)
