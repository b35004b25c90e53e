"""A `group.Group` on the meta device, without processes, that counts the bytes it would send.

Results have the shape and dtype of real ones. The compiler cannot look into them, as into a collective, so autograd
saves the same tensors around them as in a run. Bytes are those that one rank sends: an all-gather sends its tensor to
each other rank, a reduce-scatter sends each other rank its part, and an all-reduce is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowprec_train.group import nan_as_infinity


@torch.library.custom_op("lowprec_estimate::gathered", mutates_args=())
def gathered(x: Tensor, size: int, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks."""
    return torch.cat([x] * size, dim)


@torch.library.custom_op("lowprec_estimate::gathered_again", mutates_args=())
def gathered_again(x: Tensor, size: int) -> Tensor:
    """Concatenate the rows of all ranks; selective recomputation repeats it."""
    return torch.cat([x] * size)


@torch.library.custom_op("lowprec_estimate::scattered", mutates_args=())
def scattered(x: Tensor, size: int) -> Tensor:
    """Return this rank's rows of a sum."""
    return x[: x.shape[0] // size].clone()


@gathered.register_fake
def _(x: Tensor, size: int, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@gathered_again.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@scattered.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@dataclass(frozen=True)
class MetaGroup:
    """sent: bytes that this rank has sent: of activations, and under "amax" of all-reduces."""

    size: int
    rank: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"gather": 0, "scatter": 0, "amax": 0}, compare=False)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return self.all_reduce_sum(nan_as_infinity(x))

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        self._count("amax", 2 * (self.size - 1) * x.numel() * x.element_size() // self.size)
        return x.detach().clone()

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        self._count("gather", (self.size - 1) * x.numel() * x.element_size())
        if repeatable and dim == 0:
            return torch.ops.lowprec_estimate.gathered_again(x.detach(), self.size)
        return torch.ops.lowprec_estimate.gathered(x.detach(), self.size, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._count("scatter", (self.size - 1) * x.numel() * x.element_size() // self.size)
        return torch.ops.lowprec_estimate.scattered(x.detach(), self.size)

    def _count(self, what: str, size: int) -> None:
        if not torch.compiler.is_compiling():
            self.sent[what] += size
