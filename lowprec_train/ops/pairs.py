"""One matrix for two GEMMs: rounded as it lies, and transposed, since FP8 tensor cores take both operands along k.

    codes   = Q(x * across)            along the rows, for the GEMM that reduces over columns
    codes_t = Q((x * down)^T)          along the columns, for the GEMM that reduces over rows

`across` [1, k] and `down` [m, 1] are the scales that lie along those GEMMs' reductions and are folded in before
rounding (docs/numerics.md). A transposed tile gives the same codes: (-1, -1) twice, or (1, -1) and (-1, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops import reference
from lowprec_train.ops.schema import tile_shape


def quantize_both(x, amax, across, down, format, tile, tile_t, scale_rule, headroom):  # type: ignore[no-untyped-def]
    """Codes and scale of x [m, k] and of its transpose, [m, k] and [k, m] row-major, nearest. `amax`: any tensor
    whose largest element is max |x|, of the whole where x is a part of it; it spares a pass over x. Only two tiles of
    everything without factors look at it.
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


def quantize_outliers(x, clipped):  # type: ignore[no-untyped-def]
    """Carrier codes of x [m, k] with the bounds taken from its own rows."""
    return reference.quantize_carrier(x, *reference.outlier_bounds(x, clipped))


def transpose(codes: Tensor) -> Tensor:
    """Codes [m, k] -> [k, m], row-major. FP8 goes by its bytes, which torch turns faster."""
    if codes.element_size() > 1:
        return codes.t().contiguous()
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)
