"""Rounding of a matrix and its transpose for two GEMMs in one op (`ops.pairs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.numerics.formats import NEAREST
from lowprec_train.numerics.one_scale import amax_of_rows
from lowprec_train.numerics.quantizer import OWN_OPS, Quantized, Quantizer, Shared


def pairs(first: Quantizer, second: Quantizer) -> bool:
    """Return whether one op can round a matrix by `first` and its transpose by `second`: both to nearest, with the same
    format and scale rule.
    """
    plain = first.rounding is second.rounding is NEAREST and not (first.exponent_span or second.exponent_span)
    alike = all(getattr(first, name) == getattr(second, name) for name in ("format", "scale", "headroom"))
    return plain and alike and first.format.carrier.itemsize == 1 and first.scale not in OWN_OPS


def both(
    x: Tensor,
    first: Quantizer,
    second: Quantizer,
    *,
    across: Tensor | None = None,
    down: Tensor | None = None,
    amax: Tensor | None = None,
    produced: bool = False,
    shared: Shared | None = None,
) -> tuple[Quantized, Quantized]:
    """Round x [m, k] * across [1, k] by `first`, and the transpose of x * down [m, 1] by `second`; see `pairs`.

    amax: a tensor whose largest element is max |x|, from the producer of x; it saves a pass. produced: x may come from
    a compiled kernel, which computes the maximum if it can. shared: of x, if no scale depends on other parts or only
    one scale for everything does, without `across` and `down`.
    """
    first.check(x.shape[0], x.shape[1])
    second.check(x.shape[1], x.shape[0])
    if not (first.tile == second.tile == (-1, -1) and across is None and down is None):
        amax = None
    elif amax is None and produced:
        amax = amax_of_rows(x)
    if shared is not None and first.crosses(shared.dim):
        if shared.amax is None:
            left = torch.ops.lowprec.amax(x, first.tile) if amax is None else amax
            amax = shared.global_amax(left.amax().reshape(1))
        else:
            amax = shared.amax.reshape(1)
    codes, scale, codes_t, scale_t = first.kernel("quantize_both", x.device)(
        x, amax, across, down, first.format.name, first.tile, second.tile, first.scale.value, first.range_share
    )
    return first.wrap(codes, scale), second.wrap(codes_t, scale_t)
