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


def of_norm(how: Quantizer | None, y: Tensor, x: Tensor, rate: Tensor, weight: Tensor) -> Quantized:
    """Quantise the result y [m, k] of an RMSNorm by a quantiser whose tile is the whole matrix, to nearest, from the
    norm's input x [m, k], rates [m, 1] and weight [k]. Of y only the amax is used, of each row first: a compiled graph
    computes that where it makes y, and does not write y.
    """
    assert how is not None and not how.stochastic
    kernel, amax = how.kernel("quantize_by", x.device), y.abs().amax(dim=1).float()
    return how.wrap(*kernel(x, amax.amax().reshape(1, 1), None, *how.arguments, None, None, rate, weight))
