"""Rotary positions (arXiv 2104.09864) of queries and keys.

Shapes: B batch, T tokens, K key-value heads, G query heads per key-value head, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.group import kept, rounded_and_kept
from lowprec_train.precision.linear import GradCodes

Angles = tuple[Tensor, Tensor]  # cos and sin [T, H/2], FP32


def rotate(x: Tensor, angles: Angles, *, keeps: bool = False) -> Tensor:
    """Rotate x [B, T, ..., H] by the angles of its positions, in FP32; halves are paired (Hugging Face's layout).

    keeps: recomputed blocks save the result (`group.rounded_and_kept`).
    """
    cos, sin = (table.view(-1, *(1,) * (x.ndim - 3), table.shape[-1]) for table in angles)
    low, high = x.float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)
    return rounded_and_kept(rotated, x.dtype) if keeps else rotated.to(x.dtype)


def queries_keys_values(qkv_BTN: Tensor, queries: int, head_dim: int) -> tuple[Tensor, ...]:
    """Return q [B, T, K, G, H], k and v [B, T, K, 1, H], views of a projection whose columns are (K, G + 2, H)."""
    return qkv_BTN.unflatten(-1, (-1, queries + 2, head_dim)).split((queries, 1, 1), dim=-2)


def rotated_with_codes(
    qkv_BTN: Tensor, codes: GradCodes, angles: Angles, queries: int, head_dim: int
) -> tuple[Tensor, ...]:
    """Return q and k rotated, and v, of `queries_keys_values`; recomputed blocks save them.

    codes: from the linear that made `qkv_BTN` (`precision.linear.Linear.with_grad_codes`); the gradients of this
    function are that of the projection, and its codes.
    """
    result: tuple[Tensor, ...] = _RotatedWithCodes.apply(
        qkv_BTN, codes.codes, codes.scale, *angles, queries, head_dim, codes.signs, *codes.how
    )
    return result


class _RotatedWithCodes(torch.autograd.Function):
    """qkv [B, T, N], placeholders for codes [B T, N] and scales [B T, 1] of its gradient -> q, k, v."""

    @staticmethod
    def forward(ctx, qkv_BTN, codes, scale, cos, sin, queries, head_dim, signs, *how):  # type: ignore[no-untyped-def]
        q, k, v = queries_keys_values(qkv_BTN, queries, head_dim)
        ctx.how = how
        ctx.save_for_backward(cos, sin, signs)
        v = v.clone(memory_format=torch.contiguous_format)
        return tuple(kept(each) for each in (rotate(q, (cos, sin)), rotate(k, (cos, sin)), v))

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        cos, sin, signs = ctx.saved_tensors
        matrices = (each.flatten(2).flatten(0, 1) for each in gradients)
        dx, *codes = torch.ops.lowprec.rotary_backward_ladder(*matrices, cos, sin, signs, *ctx.how)
        return dx.unflatten(0, gradients[0].shape[:2]), *codes, *[None] * (5 + len(ctx.how))
