"""Rounding of a matrix under one scale, from an amax that was computed before."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.numerics.quantizer import Quantized, Quantizer


def amax_of_rows(x: Tensor) -> Tensor | None:
    """Return the amax of each row of x [m, k], FP32 [m], where a compiled graph on a GPU can compute it in the kernel
    that makes x; elsewhere None, because it would be a pass of its own.
    """
    return x.abs().amax(dim=1).float() if x.is_cuda and torch.compiler.is_compiling() else None


def under_amax(how: Quantizer, x: Tensor, amax: Tensor, seed: Tensor | None, origin: Tensor | None) -> Quantized:
    """Quantise x [m, k] by a quantiser whose tile is the whole matrix. amax: a tensor whose largest element is max |x|.
    Other arguments as in a quantiser's call.
    """
    kernel = how.kernel("quantize_by", x.device)
    return how.wrap(*kernel(x, amax.amax().reshape(1, 1), None, *how.arguments, seed, origin))


def quantize_repeatably(how: Quantizer, y: Tensor, norm: tuple[Tensor, ...], amax: bool) -> tuple[Quantized, Tensor]:
    """Quantise y [m, k] to nearest under one scale; return the codes and what rounds y again, its amax or its scale.

    norm: of the RMSNorm whose result y is, its input [m, k], rates [m, 1] and weight [k]; else empty. With it only the
    amax of y is used, of each row first: a compiled graph computes that where it makes y, and does not write y.
    """
    assert not how.stochastic
    if not norm and not amax:
        codes = how(y)
        return codes, codes.scale
    most = y.abs().amax(dim=1).float().amax().reshape(1, 1) if norm else torch.ops.lowprec.amax(y, [-1, -1])
    x, *of_norm = norm or (y, None, None)
    codes = how.wrap(*how.kernel("quantize_by", y.device)(x, most, None, *how.arguments, None, None, *of_norm))
    return codes, most if amax else codes.scale


def quantize_transposed(
    how: Quantizer, x: Tensor, amax: Tensor, *norm: Tensor, after: Tensor | None = None
) -> Quantized:
    """Quantise the transpose of x, or of what a norm with these rates and this weight makes of it, to the codes that
    `quantize_repeatably` made. after: not read.
    """
    kernel = how.kernel("quantize_transposed", x.device)
    scaled = how.format.name, how.scale.value, how.range_share
    return how.wrap(*kernel(x, amax, *scaled, *(norm or (None, None)), after))
