"""Rounding of a matrix and its transpose for two GEMMs, because FP8 tensor cores need both operands contiguous along k.

    codes   = Q(x * across)            for the GEMM that reduces over columns
    codes_t = Q((x * down)^T)          for the GEMM that reduces over rows

`across` [1, k] and `down` [m, 1] are scales along the reductions of those GEMMs, multiplied in before rounding
(docs/numerics.md). Transposed tiles give equal codes: (-1, -1) twice, or (1, -1) and (-1, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops import reference
from lowprec_train.ops.schema import tile_shape


def quantize_both(x, amax, across, down, format, tile, tile_t, scale_rule, headroom):  # type: ignore[no-untyped-def]
    """Return codes and scale of x [m, k] and of its transpose, [m, k] and [k, m] row-major, to nearest.

    amax: a tensor whose largest element is max |x|, of the whole matrix if x is a part of it; it saves a pass over x.
    It is used only if both tiles are the whole matrix and there are no factors.
    """
    x = x.float()
    everything = tile_shape(*x.shape, tile) == tile_shape(*x.t().shape, tile_t)[::-1] == x.shape
    how = (scale_rule, headroom, 0, "nearest", None, None)
    if amax is not None and everything and across is None and down is None:
        codes, scale = reference.quantize_by(x, amax.amax().reshape(1, 1), None, format, tile, *how)
        return codes, scale, codes.t().contiguous(), scale.clone()
    a, b = (x if each is None else x * each for each in (across, down))
    codes, scale = reference.quantize(a, format, tile, *how)
    codes_t, scale_t = reference.quantize(b.t().contiguous(), format, tile_t, *how)
    return codes, scale, codes_t, scale_t


def quantize_transposed(x, amax, format, scale_rule, headroom, rate=None, weight=None, after=None):  # type: ignore[no-untyped-def]
    """Return codes [k, m] and scale [1, 1] of the transpose of x [m, k], to nearest. amax [1, 1]: the largest |x|. rate
    [m] and weight [k]: x is the input of an RMSNorm, whose result is quantised, and of which amax is.
    """
    how = ((-1, -1), scale_rule, headroom, 0, "nearest", None, None, rate, weight)
    codes, scale = reference.quantize_by(x, amax.reshape(1, 1), None, format, *how)
    return transpose(codes), scale


def quantize_outliers(x, clipped):  # type: ignore[no-untyped-def]
    """Return carrier codes and scale of x [m, k], with bounds and amax from its rows."""
    amax = reference.amax(x, (1, -1))
    return reference.quantize_carrier(x, *reference.outlier_bounds(x, clipped), amax)


def fold_transposed(codes, scale, carrier, after=None):  # type: ignore[no-untyped-def]
    """`fold` codes [m, k], or two of them in a byte, and transpose the result: codes [k, m], and scales [m, 1]."""
    codes = reference.unpack_e2m1(codes) if codes.dtype == torch.uint8 else codes
    folded, rows = reference.fold(codes, scale, carrier)
    return transpose(folded), rows


def transpose(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Transpose codes [m, k] to [k, m], row-major; FP8 as bytes, which torch transposes faster."""
    if codes.element_size() > 1:
        return codes.t().contiguous()
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
