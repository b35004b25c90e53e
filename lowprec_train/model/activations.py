"""Norms and activations: formulas with their derivatives, and layer functions that are computed by one op.

A layer that saves its input uses autograd for the derivative; one that saves codes defines it. The expressions are
those of `ops.activations`, which also define the fused ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.group import kept
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.ops import activations as ops
from lowprec_train.precision.gemm import cast
from lowprec_train.precision.linear import GradCodes

Tensors = tuple[Tensor, ...]
WAYS = {"quantized_gated_silu": 2}  # inputs whose columns alternate
OF_CODES = {"quantized_gated_silu": "gated_silu_of_codes", "quantized_gelu": "gelu_of_codes"}

WithAmax = tuple[Tensor, Tensor]
"""What a layer computes [..., width], and the largest magnitude of each of its rows, a vector in FP32: all that a
linear's quantiser of a whole tensor has to know first."""

# --- formulas, FP32: `precision.saved_activations.Formula` ---


@dataclass(frozen=True)
class RMS:
    """y = n w with n = x / sqrt(mean(x^2) + eps) (arXiv 1910.07467)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return ops.norm(inputs[0], parameters[0], None, self.eps, False)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return ops.norm_gradients(dy, inputs[0], parameters[0], self.eps, False)


@dataclass(frozen=True)
class Normal:
    """y = n w (+ b) with n = (x - mean) / sqrt(var + eps) (arXiv 1607.06450)."""

    eps: float

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        bias = parameters[1] if len(parameters) > 1 else None
        return ops.norm(inputs[0], parameters[0], bias, self.eps, True)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        gradients = ops.norm_gradients(dy, inputs[0], parameters[0], self.eps, True)
        return gradients if len(parameters) == 1 else (*gradients, ops.over_tokens(dy))


@dataclass(frozen=True)
class GatedSiLU:
    """y = silu(gate) up (arXiv 2002.05202)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return ops.swiglu(*inputs)

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return ops.swiglu_gradients(dy, *inputs)


@dataclass(frozen=True)
class TanhGELU:
    """y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv 1606.08415)."""

    def forward(self, inputs: Tensors, parameters: Tensors) -> Tensor:
        return ops.tanh_gelu(inputs[0])

    def backward(self, dy: Tensor, inputs: Tensors, parameters: Tensors) -> Tensors:
        return (ops.tanh_gelu_gradient(dy, inputs[0]),)


# --- one op forward and one backward ---


def gated_silu(gate_up: Tensor, with_grad: GradCodes | Tensor | None = None) -> WithAmax:
    """silu(gate) up [..., F] of gate_up [..., 2 F], whose columns alternate gate, up.

    with_grad: from the linear that made `gate_up` (`precision.linear.Linear.with_grad_codes_or_amax`), or None; its
    gradients are codes of the gradient of gate_up, or, of a single tensor, its amax.
    """
    if not isinstance(with_grad, GradCodes):
        return _activation("gated_silu", gate_up, with_grad)
    if not torch.is_grad_enabled():
        return _activation("gated_silu", gate_up, None)
    y, amax = _GatedSiLUWithCodes.apply(gate_up.flatten(end_dim=-2), *with_grad[:3], *with_grad.how)
    return y.unflatten(0, gate_up.shape[:-1]), amax


def quantized_gated_silu(
    gate_up: Tensor, grad_amax: Tensor | None, how: Quantizer, recomputes: bool = False
) -> WithAmax:
    """silu(Q(gate)) Q(up), with codes of both saved. grad_amax: from `precision.linear.Linear.with_grad_amax`, or None;
    its gradient is the amax of the gradient of gate_up.

    recomputes: make the codes by an op of their own, and y from them (`QuantizedSavedInput`).
    """
    return _activation("quantized_gated_silu", gate_up, grad_amax, how.format.name, how.tile[1], recomputes=recomputes)


def quantized_gelu(x: Tensor, grad_amax: Tensor | None, how: Quantizer, recomputes: bool = False) -> WithAmax:
    """Tanh-GELU of Q(x) [..., width], with codes of x saved; other arguments as for `quantized_gated_silu`."""
    return _activation("quantized_gelu", x, grad_amax, how.format.name, how.tile[1], recomputes=recomputes)


def quantized_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    how: Quantizer,
    recomputes: bool = False,
) -> WithAmax:
    """RMSNorm or LayerNorm of Q(x) [..., width], with codes of x saved. recomputes: as for `quantized_gated_silu`."""
    rows, arguments = x.flatten(end_dim=-2), (weight, bias, eps, centered, how.format.name, how.tile[1])
    if torch.is_grad_enabled():
        y, amax = _QuantizedNorm.apply(recomputes, rows, *arguments)
    else:
        y, amax, *_ = _norm(rows, *arguments)
    return y.unflatten(0, x.shape[:-1]), amax


def _activation(op: str, x: Tensor, grad_amax: Tensor | None, *how: str | int, recomputes: bool = False) -> WithAmax:
    """Apply `_Activation` to matrices, so that the Function does not return a view of an inner value."""
    rows = x.flatten(end_dim=-2)
    if torch.is_grad_enabled():
        y, amax = _Activation.apply(op, recomputes, rows, grad_amax, *how)
    else:  # a compiled Function without gradients loses its context
        y, amax, *_ = getattr(torch.ops.lowprec, op)(rows, *how)
    return y.unflatten(0, x.shape[:-1]), amax


class _Activation(torch.autograd.Function):
    """x [m, k], grad_amax [m] -> y [m, width], amax [m]. Saves the other results of the op, or x if there are none."""

    @staticmethod
    def forward(ctx, op, recomputes, x, grad_amax, *how):  # type: ignore[no-untyped-def]
        if recomputes:
            saved = torch.ops.lowprec.group_codes(x, *how, WAYS.get(op, 1))
            y, amax = getattr(torch.ops.lowprec, OF_CODES[op])(*saved, *how, x.dtype)
        else:
            y, amax, *saved = getattr(torch.ops.lowprec, op)(x, *how)
        ctx.op, ctx.how = op, how
        ctx.save_for_backward(*((saved if recomputes else map(kept, saved)) if saved else (x,)))
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        op, saved = getattr(torch.ops.lowprec, f"{ctx.op}_backward"), ctx.saved_tensors
        if len(saved) == 2:  # codes of all inputs, and their exponents
            parts = (each.chunk(WAYS.get(ctx.op, 1)) for each in saved)
            saved = tuple(part for pair in zip(*parts, strict=True) for part in pair)
        dx, amax = op(dy.contiguous(), *saved, *ctx.how)
        return None, None, dx, amax if ctx.needs_input_grad[3] else None, *[None] * len(ctx.how)


class _GatedSiLUWithCodes(torch.autograd.Function):
    """gate_up [m, 2 F], placeholders for codes [m, 2 F] and scales [m, 1] of its gradient -> y [m, F], amax [m]."""

    @staticmethod
    def forward(ctx, gate_up, codes, scale, signs, *how):  # type: ignore[no-untyped-def]
        y, amax = torch.ops.lowprec.gated_silu(gate_up)
        ctx.how = how
        ctx.save_for_backward(gate_up, signs)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        gate_up, signs = ctx.saved_tensors
        # The op writes codes over dy. A compiled graph copies it first if something else reads it.
        dy = dy.contiguous() if torch.compiler.is_compiling() else dy.clone(memory_format=torch.contiguous_format)
        dx, scale = torch.ops.lowprec.gated_silu_backward_ladder(dy, gate_up, signs, *ctx.how)
        return dx, dy.view(torch.float8_e4m3fn), scale, None, *[None] * len(ctx.how)


class _QuantizedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recomputes, x, weight, bias, *how):  # type: ignore[no-untyped-def]
        if recomputes:
            saved = torch.ops.lowprec.group_codes(x, *how[-2:], 1)
            y, amax = torch.ops.lowprec.norm_of_codes(*saved, *_floats(weight, bias), *how, x.dtype)
        else:
            y, amax, *saved = _norm(x, weight, bias, *how)
        ctx.how, ctx.bias_dtype = how, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *saved)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        weight, *saved = ctx.saved_tensors
        biased = ctx.bias_dtype is not None
        dx, dweight, dbias = torch.ops.lowprec.quantized_norm_backward(
            dy.contiguous(), *saved, weight.float(), biased, *ctx.how
        )
        dbias = cast(dbias, ctx.bias_dtype) if biased else None
        return None, dx, cast(dweight, weight.dtype), dbias, *[None] * len(ctx.how)


def _norm(x, weight, bias, *how):  # type: ignore[no-untyped-def]
    return torch.ops.lowprec.quantized_norm(x, *_floats(weight, bias), *how)


def _floats(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.float(), None if bias is None else bias.float()
