"""What the ranks of one tensor-parallel layer tell each other: rows of activations, sums of partial rows, maxima.

    gather_rows         [m, k] of every rank -> [count m, k]        backward: scatter_sum_rows of the gradient
    scatter_sum_rows    [count m, k] -> sum over ranks of my m      backward: gather_rows of the gradient

A rank's rows are consecutive and ranks are in order, so each of them is one collective over contiguous memory. Sums are
not left to the network: an all-to-all brings every rank's contribution to my rows, and they are added here in FP32, in
rank order, and rounded once to their dtype. That sends the bytes of a reduce-scatter, and the result depends neither on
the library nor on its algorithm: a ring that adds BF16 rounds at every hop.

Collectives are PyTorch's functional operations, which name their group by a string: they run eagerly and inside a graph
of torch.compile alike, on gloo and on NCCL. They have no public name (decision 0017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True)
class GroupRanks:
    """The ranks of a process group (a `precision.split.Ranks`): how many, which of them this is, the group's name."""

    count: int
    index: int
    name: str

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupRanks:
        """Those of `group`, which this process belongs to."""
        return cls(count=group.size(), index=group.rank(), name=group.group_name)

    def largest(self, x: Tensor) -> Tensor:
        """The elementwise maximum over ranks, FP32; NaN counts as infinity. Not differentiable."""
        x = x.detach().float()
        return _arrived(_c10d.all_reduce(x.masked_fill(x.isnan(), torch.inf), "max", self.name))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """x of every rank, concatenated along `dim` in rank order. Not differentiable; codes travel as bytes, for gloo
        knows no FP8.
        """
        wire = x.detach().contiguous()
        wire = wire.view(torch.uint8) if x.element_size() == 1 else wire
        parts = self._gathered(wire).view(x.dtype).unflatten(0, (self.count, x.shape[0]))
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def gather_rows(self, x: Tensor) -> Tensor:
        """x [m, k] -> [count m, k], in rank order."""
        rows: Tensor = _GatherRows.apply(x, self)
        return rows

    def scatter_sum_rows(self, x: Tensor) -> Tensor:
        """x [count m, k] -> [m, k], the sum over ranks of this rank's rows, added in FP32 in rank order."""
        rows: Tensor = _ScatterSumRows.apply(x, self)
        return rows

    def _gathered(self, x: Tensor) -> Tensor:
        """x [m, ...] of every rank as [count m, ...]."""
        return _arrived(_c10d.all_gather_into_tensor(x.contiguous(), self.count, self.name))

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's rows of x [count m, k]."""
        rows = [x.shape[0] // self.count] * self.count
        first, *others = _arrived(_c10d.all_to_all_single(x.contiguous(), rows, rows, self.name)).split(rows)
        total = first.float()
        for part in others:
            total = total + part
        return total if x.dtype == torch.float32 else total.to(x.dtype)  # an alias loses its gradient when compiled


def _arrived(x: Tensor) -> Tensor:
    """x once the device's stream has waited for it."""
    waited: Tensor = _c10d.wait_tensor(x)
    return waited


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: GroupRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks._gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._summed(gradients[0]), None


class _ScatterSumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: GroupRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks._summed(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._gathered(gradients[0]), None
