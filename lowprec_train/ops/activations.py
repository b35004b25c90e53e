"""Norms and activations, their derivatives, and the ops that compute them in one pass.

    norm         y = n weight + bias;  n = (x - mean) / sqrt(var + eps), or without centring x / sqrt(mean(x^2) + eps)
    gated_silu   y = silu(gate) up (SwiGLU, arXiv 2002.05202); the columns of `gate_up` alternate gate, up
    gelu         y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)

What goes on to a linear, y or an activation's dx, comes with `amax`, the largest magnitude of each row: the quantiser
of a whole tensor there (`quantize_both`) then needs no pass of its own for it. All in FP32, rounded once to the
stream's dtype.

The `quantized_` ops round their input and save its codes (COAT, arXiv 2410.19313, section 5):

    forward     x^ = Q(x) in groups along a row,  y = f(x^)        one read of x; y, codes and exponents are written
    backward    dx = f'(x^) dy, x^ from the codes                  one read of dy and of the codes

Scales are powers of two that never saturate (POW2 and E8M0_CEIL agree), stored as biased exponents of one byte; two
E2M1 codes share a byte. Statistics and derivatives are computed again from the codes.
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
    """(dx, dweight); a bias takes the sum of dy over all rows, as a weight does that of dy n."""
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
    """The sum over all dimensions but the last."""
    return each.flatten(end_dim=-2).sum(0)


# --- saved codes ---


WIDEST_NORM = 16384  # columns; a row stays on one multiprocessor


def has_kernel(op: str, width: int, format: str, group: int) -> bool:
    """Whether a compiled kernel takes rows of `width` columns in groups of `group`; the reference takes any."""
    if op == "quantized_norm" and width > WIDEST_NORM:
        return False
    return format in ("E4M3", "E5M2", "E2M1") and group in (16, 32, 64, 128, 256) and width % group == 0


def _rounded(x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes and exponents, which are saved; x^, which they stand for)."""
    codes, scale = reference.quantize(x, format, (1, group), "POW2", 1.0, 0, "nearest", None, None)
    stored = reference.pack_e2m1(codes) if format == "E2M1" else codes
    return stored, (scale.view(torch.int32) >> 23).to(torch.uint8), reference.dequantize(codes, scale)


def _restore(codes: Tensor, exponents: Tensor, format: str) -> Tensor:
    codes = reference.unpack_e2m1(codes) if format == "E2M1" else codes
    return reference.dequantize(codes, (exponents.int() << 23).view(torch.float32))


def _rounded_once(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y in `dtype`, and the largest magnitude of each of its rows, FP32."""
    y = y.to(dtype)
    return y, y.float().abs().amax(-1)


# --- ops ---


def gated_silu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [m, 2 F] -> y [m, F] in its dtype, amax FP32 [m]."""
    return _rounded_once(swiglu(*gate_up.float().unflatten(1, (-1, 2)).unbind(2)), gate_up.dtype)


def gated_silu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """dy [m, F] -> the gradient of `gate_up` [m, 2 F] in dy's dtype, amax FP32 [m]."""
    gradients = swiglu_gradients(dy.float(), *gate_up.float().unflatten(1, (-1, 2)).unbind(2))
    return _rounded_once(torch.stack(gradients, dim=2).flatten(1), dy.dtype)


def quantized_norm(x, weight, bias, eps, centered, format, group):  # type: ignore[no-untyped-def]
    """x [m, k], weight and bias [k] FP32 -> y [m, k] in x's dtype, amax [m], codes, exponents [m, k / group]."""
    codes, exponents, values = _rounded(x, format, group)
    return *_rounded_once(norm(values, weight, bias, eps, centered), x.dtype), codes, exponents


def quantized_norm_backward(dy, codes, exponents, weight, biased, eps, centered, format, group):  # type: ignore[no-untyped-def]
    """dx in dy's dtype; dweight and dbias [k] FP32, dbias empty unless `biased`."""
    values = _restore(codes, exponents, format)
    dx, dweight = norm_gradients(dy.float(), values, weight, eps, centered)
    return dx.to(dy.dtype), dweight, over_tokens(dy.float()) if biased else dweight.new_empty(0)


def quantized_gated_silu(gate_up, format, group):  # type: ignore[no-untyped-def]
    """gate_up [m, 2 F] -> y [m, F], amax [m], codes and exponents of gate, codes and exponents of up."""
    gate, up = (_rounded(part, format, group) for part in gate_up.unflatten(1, (-1, 2)).unbind(2))
    return *_rounded_once(swiglu(gate[2], up[2]), gate_up.dtype), *gate[:2], *up[:2]


def quantized_gated_silu_backward(dy, gate, gate_exponents, up, up_exponents, format, group):  # type: ignore[no-untyped-def]
    """The gradient of `gate_up`, [m, 2 F] in dy's dtype, and its amax [m]."""
    values = _restore(gate, gate_exponents, format), _restore(up, up_exponents, format)
    return _rounded_once(torch.stack(swiglu_gradients(dy.float(), *values), dim=2).flatten(1), dy.dtype)


def quantized_gelu(x, format, group):  # type: ignore[no-untyped-def]
    """x [m, k] -> y in x's dtype, amax [m], codes, exponents [m, k / group]."""
    codes, exponents, values = _rounded(x, format, group)
    return *_rounded_once(tanh_gelu(values), x.dtype), codes, exponents


def quantized_gelu_backward(dy, codes, exponents, format, group):  # type: ignore[no-untyped-def]
    """dx [m, k] in dy's dtype, and its amax [m]."""
    return _rounded_once(tanh_gelu_gradient(dy.float(), _restore(codes, exponents, format)), dy.dtype)
