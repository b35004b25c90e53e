"""Tensor-parallel ranks that nobody starts: shapes on the meta device, and how much would travel.

`MetaRanks` is a `precision.split.Ranks`. What it returns has the shape and dtype that the real one returns, and is
opaque to the compiler as a collective is, so that what autograd keeps around it is what it keeps in a run. Bytes are
those that one rank sends: a gather sends its part to each of the others, a scatter each of the others theirs, and a
maximum is an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("lowprec_estimate::gathered", mutates_args=())
def gathered(x: Tensor, count: int, dim: int) -> Tensor:
    """Parts of all ranks side by side."""
    return torch.cat([x] * count, dim)


@torch.library.custom_op("lowprec_estimate::scattered", mutates_args=())
def scattered(x: Tensor, count: int) -> Tensor:
    """This rank's rows of a sum."""
    return x[: x.shape[0] // count].clone()


@gathered.register_fake
def _(x: Tensor, count: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= count
    return x.new_empty(shape)


@scattered.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty((x.shape[0] // count, *x.shape[1:]))


@dataclass(kw_only=True)
class MetaRanks:
    """count: ranks; index: which of them this is. sent: bytes that it has sent."""

    count: int
    index: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"gather": 0, "scatter": 0, "maxima": 0})

    def largest(self, x: Tensor) -> Tensor:
        """As `Ranks.largest`."""
        self._send("maxima", 2 * (self.count - 1) * 4 * x.numel() // self.count)
        return x.detach().float().clone()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """As `Ranks.gather`."""
        return self._gathered(x.detach(), dim)

    def gather_rows(self, x: Tensor) -> Tensor:
        """As `Ranks.gather_rows`."""
        rows: Tensor = _GatherRows.apply(x, self)
        return rows

    def scatter_sum_rows(self, x: Tensor) -> Tensor:
        """As `Ranks.scatter_sum_rows`."""
        rows: Tensor = _ScatterSumRows.apply(x, self)
        return rows

    def _gathered(self, x: Tensor, dim: int = 0) -> Tensor:
        self._send("gather", (self.count - 1) * x.numel() * x.element_size())
        return torch.ops.lowprec_estimate.gathered(x, self.count, dim)

    def _scattered(self, x: Tensor) -> Tensor:
        self._send("scatter", (self.count - 1) * x.numel() * x.element_size() // self.count)
        return torch.ops.lowprec_estimate.scattered(x, self.count)

    def _send(self, what: str, size: int) -> None:
        if not torch.compiler.is_compiling():
            self.sent[what] += size


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: MetaRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks._gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._scattered(gradients[0]), None


class _ScatterSumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: MetaRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks._scattered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._gathered(gradients[0]), None
