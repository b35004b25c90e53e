"""Norms and activations with their derivatives, and the ops that compute them in one pass.

    norm         y = n weight + bias;  n = (x - mean) / sqrt(var + eps), or without centring x / sqrt(mean(x^2) + eps)
    gated_silu   y = silu(gate) up (SwiGLU, arXiv 2002.05202); the columns of `gate_up` alternate gate, up
    gelu         y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)

Outputs that are inputs of a linear or its backward pass (y, and dx of an activation) come with `amax`, the largest
magnitude of each row, so that per-tensor quantisation (`quantize_both`) needs no extra pass for it. Arithmetic is FP32,
rounded once to the dtype of the input.

The `quantized_` ops round their input and save its codes for the backward pass (COAT, arXiv 2410.19313, section 5):

    forward     x^ = Q(x) in groups along a row,  y = f(x^)        reads x once; writes y, codes and exponents
    backward    dx = f'(x^) dy, x^ from the codes                  reads dy and the codes once

Scales are powers of two that never saturate (POW2 and E8M0_CEIL are equal here), stored as biased exponents of one
byte; two E2M1 codes share a byte. The backward pass recomputes statistics and derivatives from the codes.

`group_codes` makes the codes alone, and the ops `_of_codes` compute y and amax from them: in two passes the bits of a
`quantized_` op, in a form that can recompute y from what is saved. `saved_codes` (ops/library.py) makes the codes of
any quantiser.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.ops import reference

# --- formulas and their derivatives, FP32 ---


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """RMSNorm (arXiv 1910.07467), or centred LayerNorm (arXiv 1607.06450), over the last dimension."""
    if centered:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    y = F.rms_norm(x, weight.shape, weight, eps)
    return y if bias is None else y + bias


def norm_gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight), dweight summed over rows; the gradient of a bias is the sum of dy over rows."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    rate = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    n, g = x * rate, dy * weight
    inner = g - g.mean(-1, keepdim=True) if centered else g
    dx = rate * (inner - n * (g * n).mean(-1, keepdim=True))
    return dx, over_tokens(dy * n)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigma = torch.sigmoid(gate)
    return dy * up * (sigma * (1 + gate * (1 - sigma))), dy * (gate * sigma)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def tanh_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    slope = math.sqrt(2 / math.pi)
    t = torch.tanh(slope * (x + 0.044715 * x * x * x))
    return dy * 0.5 * (1 + t + x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x))


def over_tokens(each: Tensor) -> Tensor:
    """Return the sum over all dimensions except the last."""
    return each.flatten(end_dim=-2).sum(0)


# --- saved codes ---


WIDEST_NORM = 16384  # columns; one thread block holds a row


def has_kernel(op: str, width: int, format: str, group: int) -> bool:
    """Return whether a compiled kernel supports rows of `width` columns in groups of `group`; the reference does."""
    if op == "quantized_norm" and width > WIDEST_NORM:
        return False
    return format in ("E4M3", "E5M2", "E2M1") and group in (16, 32, 64, 128, 256) and width % group == 0


def _quantized(x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes and exponents, which are saved; x^, their dequantised values)."""
    codes, scale = reference.quantize(x, format, (1, group), "POW2", 1.0, 0, "nearest", None, None)
    stored = reference.pack_e2m1(codes) if format == "E2M1" else codes
    return stored, exponents_of(scale), reference.dequantize(codes, scale)


def _dequantized(codes: Tensor, exponents: Tensor, format: str) -> Tensor:
    """Return values as the backward kernels compute them: with a scale of 2^128, Inf, where the exponent is 255."""
    codes = reference.unpack_e2m1(codes) if format == "E2M1" else codes
    return reference.dequantize(codes, (exponents.int() << 23).view(torch.float32))


def exponents_of(scale: Tensor) -> Tensor:
    """Return the biased exponents of scales, a byte each (E8M0; 255 for NaN)."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def scales_of(exponents: Tensor) -> Tensor:
    """Inverse of `exponents_of`, FP32."""
    bits = exponents.int()
    return ((bits << 23) | ((bits == 255).int() << 22)).view(torch.float32)


def dequantized(codes: Tensor, exponents: Tensor, format: str) -> Tensor:
    """Return the values of saved codes, FP32 [m, k]; NaN where the scale is NaN, also for E2M1, which has no NaN."""
    codes = reference.unpack_e2m1(codes) if format == "E2M1" else codes
    return reference.dequantize(codes, scales_of(exponents))


def _cast_with_amax(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y in `dtype`, and the largest magnitude of each row, FP32."""
    y = y.to(dtype)
    return y, y.float().abs().amax(-1)


# --- ops ---


def gated_silu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Map gate_up [m, 2 F] to y [m, F] in its dtype, and amax FP32 [m]."""
    return _cast_with_amax(swiglu(*gate_up.float().unflatten(1, (-1, 2)).unbind(2)), gate_up.dtype)


def group_codes(x: Tensor, format: str, group: int, ways: int) -> tuple[Tensor, Tensor]:
    """Return codes and exponents of x [m, ways k], whose columns are in turn of `ways` matrices [m, k], one below the
    other: [ways m, k] and [ways m, k / group].
    """
    parts = [_quantized(part, format, group)[:2] for part in x.unflatten(1, (-1, ways)).unbind(2)]
    codes, exponents = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(exponents)


def gated_silu_of_codes(codes, exponents, format, group, dtype):  # type: ignore[no-untyped-def]
    """Map codes and exponents of gate and up, [2 m, F] and [2 m, F / group], to y [m, F] in `dtype`, and amax [m]."""
    return _cast_with_amax(swiglu(*dequantized(codes, exponents, format).chunk(2)), dtype)


def gated_silu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Map dy [m, F] to the gradient of `gate_up` [m, 2 F] in the dtype of dy, and amax FP32 [m]."""
    gradients = swiglu_gradients(dy.float(), *gate_up.float().unflatten(1, (-1, 2)).unbind(2))
    return _cast_with_amax(torch.stack(gradients, dim=2).flatten(1), dy.dtype)


def quantized_norm(x, weight, bias, eps, centered, format, group):  # type: ignore[no-untyped-def]
    """Map x [m, k], weight and bias [k] FP32 to y [m, k] in x's dtype, amax [m], codes, exponents [m, k / group]."""
    codes, exponents, values = _quantized(x, format, group)
    return *_cast_with_amax(norm(values, weight, bias, eps, centered), x.dtype), codes, exponents


def norm_of_codes(codes, exponents, weight, bias, eps, centered, format, group, dtype):  # type: ignore[no-untyped-def]
    """Map codes and exponents of x [m, k], weight and bias [k] FP32 to y [m, k] in `dtype`, and amax [m]."""
    return _cast_with_amax(norm(dequantized(codes, exponents, format), weight, bias, eps, centered), dtype)


def quantized_norm_backward(dy, codes, exponents, weight, biased, eps, centered, format, group):  # type: ignore[no-untyped-def]
    """Return dx in the dtype of dy; dweight and dbias [k] FP32, dbias empty unless `biased`."""
    values = _dequantized(codes, exponents, format)
    dx, dweight = norm_gradients(dy.float(), values, weight, eps, centered)
    return dx.to(dy.dtype), dweight, over_tokens(dy.float()) if biased else dweight.new_empty(0)


def quantized_gated_silu(gate_up, format, group):  # type: ignore[no-untyped-def]
    """Map gate_up [m, 2 F] to y [m, F], amax [m], codes and exponents of gate, codes and exponents of up."""
    gate, up = (_quantized(part, format, group) for part in gate_up.unflatten(1, (-1, 2)).unbind(2))
    return *_cast_with_amax(swiglu(gate[2], up[2]), gate_up.dtype), *gate[:2], *up[:2]


def quantized_gated_silu_backward(dy, gate, gate_exponents, up, up_exponents, format, group):  # type: ignore[no-untyped-def]
    """Return the gradient of `gate_up`, [m, 2 F] in the dtype of dy, and its amax [m]."""
    values = _dequantized(gate, gate_exponents, format), _dequantized(up, up_exponents, format)
    return _cast_with_amax(torch.stack(swiglu_gradients(dy.float(), *values), dim=2).flatten(1), dy.dtype)


def quantized_gelu(x, format, group):  # type: ignore[no-untyped-def]
    """Map x [m, k] to y in its dtype, amax [m], codes, exponents [m, k / group]."""
    codes, exponents, values = _quantized(x, format, group)
    return *_cast_with_amax(tanh_gelu(values), x.dtype), codes, exponents


def gelu_of_codes(codes, exponents, format, group, dtype):  # type: ignore[no-untyped-def]
    """Map codes and exponents of x [m, k] to y [m, k] in `dtype`, and amax [m]."""
    return _cast_with_amax(tanh_gelu(dequantized(codes, exponents, format)), dtype)


def quantized_gelu_backward(dy, codes, exponents, format, group):  # type: ignore[no-untyped-def]
    """Return dx [m, k] in the dtype of dy, and its amax [m]."""
    return _cast_with_amax(tanh_gelu_gradient(dy.float(), _dequantized(codes, exponents, format)), dy.dtype)
