"""The ranks that share a tensor: an interface of four collectives.

Sums are added in rank order, in FP32 or wider: the same bits on every rank, with any library and any algorithm. Groups
are process groups (`comm.process_group`), one process (`SINGLE`), or shapes without processes (`tools.estimate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """A group of ranks. All of them call the same methods in the same order; torch.compile traces the calls. Results
    are not differentiable. Groups are hashable, and equal if they have the same ranks.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks, FP32; NaN counts as infinity."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over ranks of floating-point x, in x's dtype. For small tensors."""

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        """x [m, ...] of every rank, concatenated along `dim` in rank order: [size m, ...]. repeatable: recomputed
        blocks gather again instead of saving the result.
        """

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size m, ...] -> [m, ...]: the sum over ranks of this rank's rows, rounded once to x's dtype."""


@dataclass(frozen=True)
class SingleRank:
    """A group of one rank: nothing is sent."""

    size: int = 1
    rank: int = 0

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return nan_as_infinity(x)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x.detach()

    def all_gather(self, x: Tensor, dim: int = 0, *, repeatable: bool = False) -> Tensor:
        return x.detach()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.detach()


SINGLE = SingleRank()


def nan_as_infinity(x: Tensor) -> Tensor:
    """Return x for a maximum: FP32, with NaN as infinity. Libraries may drop NaN, but not infinity."""
    x = x.detach().float()
    return x.masked_fill(x.isnan(), torch.inf)


def sum_in_order(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Add the parts one after the other in FP32, or FP64 for FP64 parts, and round once to their dtype."""
    first, *others = parts
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for part in others:
        total = total + part
    return rounded(total, first.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product or a sum over ranks in its final dtype; x itself if it has this dtype, because an alias loses
    its gradient when compiled (torch 2.11).

    A compiled graph has an operation that nothing else calls, so that `model.recompute` knows what it may save.
    """
    if x.dtype == dtype:
        return x
    if not torch.compiler.is_compiling():
        return x.to(dtype)
    narrowed: Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
    return narrowed


def kept(x: Tensor) -> Tensor:
    """Return x, so that a recomputed block saves it and not what it is made from. A compiled graph has an operation
    here that does nothing; `model.joint_graph.KeepMarked` removes it.
    """
    if not torch.compiler.is_compiling():
        return x
    same: Tensor = torch.ops.prims.convert_element_type.default(x, x.dtype)
    return same


def rounded_and_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, `kept`, with a gradient."""
    result: Tensor = _RoundedAndKept.apply(x, dtype) if torch.compiler.is_compiling() else x.to(dtype)
    return result


class _RoundedAndKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        result: Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def all_gather_rows(x: Tensor, group: Group) -> Tensor:
    """x [m, k] -> [size m, k] in rank order, differentiable: backward is a `reduce_scatter` of the gradient."""
    return _Rows.apply(x, group, True)


def reduce_scatter_rows(x: Tensor, group: Group, own_gradient: Tensor | None = None) -> Tensor:
    """x [size m, k] -> [m, k], the sum of this rank's rows, differentiable: backward is an `all_gather`.

    own_gradient: a placeholder [m, k] that receives the gradient before the all-gather; x's gradient is then zeros,
    and nothing is sent. The op that produced x gathers the rows in its own format.
    """
    return _Rows.apply(x, group, False) if own_gradient is None else _OwnGradient.apply(x, own_gradient, group)


class _Rows(torch.autograd.Function):
    """The two collectives as autograd functions: each is the backward of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, gather: bool) -> Tensor:
        ctx.group, ctx.gather = group, gather
        return group.all_gather(x, repeatable=True) if gather else group.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return ctx.group.reduce_scatter(gradient) if ctx.gather else ctx.group.all_gather(gradient), None, None


class _OwnGradient(torch.autograd.Function):
    """A reduce-scatter that passes on the gradient of this rank's rows as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own_gradient: Tensor, group: Group) -> Tensor:
        ctx.shape = x.shape
        return group.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient.new_zeros(()).expand(ctx.shape), gradient, None  # zeros without memory
