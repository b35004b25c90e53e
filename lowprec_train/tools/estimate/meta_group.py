"""Ranks that nobody starts: a `group.Group` of shapes on the meta device, which counts what it would send.

Results have the shape and dtype of real ones, and are opaque to the compiler as a collective is, so that what autograd
keeps around them is what it keeps in a run. Bytes are those that one rank sends: a gather sends its tensor to each of
the others, a reduce-scatter each of the others theirs, and an all-reduce is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowprec_train.group import nan_as_infinity


@torch.library.custom_op("lowprec_estimate::gathered", mutates_args=())
def gathered(x: Tensor, size: int, dim: int) -> Tensor:
    """Tensors of all ranks side by side."""
    return torch.cat([x] * size, dim)


@torch.library.custom_op("lowprec_estimate::scattered", mutates_args=())
def scattered(x: Tensor, size: int) -> Tensor:
    """This rank's rows of a sum."""
    return x[: x.shape[0] // size].clone()


@gathered.register_fake
def _(x: Tensor, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@scattered.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@dataclass(frozen=True)
class MetaGroup:
    """sent: bytes that this rank has sent, of activations and, under "amax", of all-reduces."""

    size: int
    rank: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"gather": 0, "scatter": 0, "amax": 0}, compare=False)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.all_reduce_sum(nan_as_infinity(x))

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        self._count("amax", 2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
        return x.detach().clone()

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        self._count("gather", (self.size - 1) * x.numel() * x.element_size())
        return torch.ops.lowprec_estimate.gathered(x.detach(), self.size, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count("scatter", (self.size - 1) * x.numel() * x.element_size() // self.size)
        return torch.ops.lowprec_estimate.scattered(x.detach(), self.size)

    def _count(self, what: str, size: int) -> None:
        if not torch.compiler.is_compiling():
            self.sent[what] += size
