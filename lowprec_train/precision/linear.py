"""nn.Linear with a recipe: precision is a property of the layer, not a subclass of it.

What crosses autograd is flat tensors: the Function takes x and the weight and returns y; codes live between forward and
backward only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.numerics.draws import Draws, Gemms, Purpose, SiteDraws
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.gemm import accumulate, cast, multiply
from lowprec_train.precision.outliers import Residual
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse

Kept = dict[str, Tensor]


class Linear(nn.Linear):
    """y = x W^T + b with master weights in the parameter's dtype and GEMMs in x's dtype or in the recipe's.

    recipe: a LinearRecipe; the default is bit-equal to F.linear in x's dtype. x [..., in] -> [..., out].
    draws: this layer's view of a run's seeds, from `precision.policy.attach_draws`. A layer outside of a run draws as a
    run of seed 0 does at its step 0, the same bits at every call.
    """

    draws: SiteDraws | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draws = None
        self.recipe = LinearRecipe()

    @property
    def recipe(self) -> LinearRecipe:
        """The precision of the three GEMMs; may be set at any time."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: LinearRecipe) -> None:
        self._recipe = recipe
        if recipe.draws and self.draws is None and not self.weight.is_meta:
            draws = Draws(0, 1, self.weight.device)
            draws.begin(0, 0)
            self.draws = draws.site(0)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.recipe.is_identity:
            return F.linear(x, self.weight.to(x.dtype), bias)
        seeds = () if self.draws is None else (self.draws.seeds, self.draws.token_rows, self.draws.token_columns)
        y = _LinearFunction.apply(x.flatten(end_dim=-2), self.weight, self.recipe, *seeds)
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


class _LinearFunction(torch.autograd.Function):
    """x [m, k], weight [n, k], seeds -> y [m, n]."""

    @staticmethod
    def forward(ctx, x, weight, recipe, *seeds):  # type: ignore[no-untyped-def]
        y, kept = _fprop(x, weight, recipe, _site(seeds))
        ctx.recipe, ctx.names, ctx.dtype, ctx.inputs = recipe, tuple(kept), x.dtype, 3 + len(seeds)
        ctx.save_for_backward(weight, *seeds, *kept.values())
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        weight, *rest = ctx.saved_tensors
        seeds, kept = rest[: ctx.inputs - 3], dict(zip(ctx.names, rest[ctx.inputs - 3 :], strict=True))
        dx, dw = _backward(dy.contiguous(), weight, kept, ctx.recipe, _site(seeds), ctx.dtype, ctx.needs_input_grad)
        return dx, dw, *([None] * (ctx.inputs - 2))


def _site(seeds: Any) -> SiteDraws | None:
    return SiteDraws(*seeds) if seeds else None


def _seed(draws: SiteDraws | None, gemm: Gemms, purpose: Purpose) -> Tensor:
    if draws is None:
        raise ValueError("a stochastic recipe needs draws: call precision.policy.attach_draws(model, draws) first")
    return draws.seed(gemm, purpose)


def _fprop(x: Tensor, weight: Tensor, recipe: LinearRecipe, draws: SiteDraws | None) -> tuple[Tensor, Kept]:
    """Y = X W^T, and what the backward pass needs besides the weight."""
    gemm, w = recipe.fprop, cast(weight, x.dtype)
    kept: Kept = {}
    a: Any = x
    b: Any = w
    residual = None
    if gemm.rotation is not None:
        seed = _seed(draws, Gemms.FPROP, Purpose.ROTATION)
        a, b = gemm.rotation(x, seed), gemm.rotation(w, seed)
    if gemm.a is not None:
        a, residual = _quantize_input(a, gemm, draws)
    if isinstance(gemm.b, Quantizer):
        b = _quantize(gemm.b, b, draws, Gemms.FPROP, Purpose.B, None)
        kept |= {"w_codes": b.codes, "w_scale": b.scale}
    dtype = x.dtype if residual is None else torch.float32
    y = multiply(a, b, split_accumulation=gemm.split_accumulation, dtype=dtype)
    if residual is not None:
        y = cast(y + accumulate(residual.dense(x.dtype), w), x.dtype)
    return y, _kept(kept, x, a, residual, recipe)


def _quantize_input(x: Tensor, gemm: Gemm, draws: SiteDraws | None) -> tuple[Quantized, Residual | None]:
    assert gemm.a is not None
    if gemm.outliers is None:
        return _quantize(gemm.a, x, draws, Gemms.FPROP, Purpose.A, None if draws is None else draws.token_rows), None
    seed = _seed(draws, Gemms.FPROP, Purpose.A) if gemm.a.stochastic else None
    return gemm.outliers(x, gemm.a, seed, draws.token_rows if draws is not None and gemm.a.stochastic else None)


def _quantize(
    quantizer: Quantizer, x: Tensor, draws: SiteDraws | None, gemm: Gemms, purpose: Purpose, origin: Tensor | None
) -> Quantized:
    if not quantizer.stochastic:
        return quantizer(x)
    return quantizer(x, _seed(draws, gemm, purpose), origin)


def _kept(kept: Kept, x: Tensor, a: Tensor | Quantized, residual: Residual | None, recipe: LinearRecipe) -> Kept:
    if recipe.dgrad.b is not Reuse.FPROP_CODES:
        kept.pop("w_codes", None)
        if isinstance(recipe.estimator, StraightThrough):
            kept.pop("w_scale", None)
    if not recipe.keeps_codes:
        return kept | {"x": x}
    assert isinstance(a, Quantized)
    kept |= {"x_codes": a.codes, "x_scale": a.scale}
    return kept if residual is None else kept | {"residual": residual.values, "columns": residual.columns}


def _backward(dy, weight, kept, recipe, draws, dtype, needs):  # type: ignore[no-untyped-def]
    dx = dw = shared = None
    if all(needs[:2]) and _shares_dy(recipe, kept):
        shared = recipe.dgrad.a(dy)
    if needs[0]:
        if recipe.dgrad.b is Reuse.FPROP_CODES:
            b = Quantized(kept["w_codes"], kept["w_scale"]).t()
        else:
            b = cast(weight, dtype).t().contiguous()
        dx = _grad_gemm(recipe.dgrad, Gemms.DGRAD, dy if shared is None else shared, b, draws, dtype)
    if needs[1]:
        dw = _weight_grad(dy, shared, kept, recipe, draws, dtype)
        dw = cast(recipe.estimator(dw, cast(weight, dtype), kept.get("w_scale", dw)), weight.dtype)
    return dx, dw


def _shares_dy(recipe: LinearRecipe, kept: Kept) -> bool:
    """True when dgrad and wgrad see the same codes of dY: one tensor scale, nothing rotated, drawn or folded."""
    a, plain = recipe.dgrad.a, recipe.dgrad.rotation is None and recipe.wgrad.rotation is None
    if a is None or a != recipe.wgrad.a or a.tile != (-1, -1) or a.stochastic or not plain:
        return False
    return not any(
        gemm.b is Reuse.FPROP_CODES and _along_k(kept[name])
        for gemm, name in ((recipe.dgrad, "w_scale"), (recipe.wgrad, "x_scale"))
    )


def _along_k(scale: Tensor) -> bool:
    """A scale per row of W or X lies along the reduction dimension of the backward GEMM."""
    return scale.shape[1] == 1 and scale.shape[0] > 1


def _weight_grad(dy, shared, kept, recipe, draws, dtype):  # type: ignore[no-untyped-def]
    a = shared.t() if shared is not None else dy.t().contiguous()
    if not recipe.keeps_codes:
        b = kept["x"].t().contiguous()
    else:
        b = Quantized(kept["x_codes"], kept["x_scale"])
        b = b.t() if recipe.wgrad.b is Reuse.FPROP_CODES else cast(b.dequantize(), dtype).t().contiguous()
    dw = _grad_gemm(recipe.wgrad, Gemms.WGRAD, a, b, draws, torch.float32)
    if "residual" in kept:
        k = kept["x_codes"].shape[1]
        rest = Residual(kept["residual"], kept["columns"], k).dense(dtype)
        dw = dw + accumulate(dy.t().contiguous(), rest.t().contiguous())
    return dw


def _grad_gemm(gemm, which, a, b, draws, dtype):  # type: ignore[no-untyped-def]
    """a [m, k] (dY or dY^T, or its codes) times b [n, k]^T (weight or input, plain or fprop's codes)."""
    if isinstance(b, Quantized) and b.scale.shape[0] == 1 and b.scale.shape[1] == b.codes.shape[1] > 1:
        a, b = a.float() * b.scale, Quantized(b.codes, torch.ones_like(b.scale[:, :1]))
    if gemm.rotation is not None:
        seed = _seed(draws, which, Purpose.ROTATION)
        a, b = gemm.rotation(a, seed), gemm.rotation(b, seed)
    if gemm.a is not None and not isinstance(a, Quantized):
        a = _quantize(gemm.a, a, draws, which, Purpose.A, _token_origin(draws, which, Purpose.A))
    if isinstance(gemm.b, Quantizer):
        b = _quantize(gemm.b, b, draws, which, Purpose.B, _token_origin(draws, which, Purpose.B))
    return multiply(a, b, split_accumulation=gemm.split_accumulation, dtype=dtype)


def _token_origin(draws: SiteDraws | None, gemm: Gemms, purpose: Purpose) -> Tensor | None:
    """Where the operand's tokens lie: rows of dY in dgrad, columns of dY^T and X^T in wgrad, none in W^T."""
    if draws is None:
        return None
    if gemm is Gemms.WGRAD:
        return draws.token_columns
    return draws.token_rows if purpose is Purpose.A else None
