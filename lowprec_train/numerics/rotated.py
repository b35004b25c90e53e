"""NVFP4 after a random Hadamard transform in one op, as codes or as values.

of_rotated   codes and scales, as `Quantizer` makes them from a matrix that was rotated before
values       codes times block scales in BF16, which represents them exactly, with the outer scale apart: for BF16
             GEMMs, without codes, block scales and a pass that decodes them
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.quantizer import WHOLE, Quantized, Quantizer, ScaleRule, Shared
from lowprec_train.ops.eden import BLOCK


def rotates(how: Quantizer, cut: int | None) -> bool:
    """Return whether one op rotates and rounds a matrix, or a shard of one along dimension `cut`: for GROUP, and for
    NVFP4 with one outer scale whose maximum the op computes.
    """
    if how.correction is Correction.GROUP:
        return True
    alone = cut is None or not how.crosses(cut)
    return how.scale is ScaleRule.NVFP4 and how.outer == WHOLE and how.candidates is Candidates.NONE and alone


def makes_values(how: Quantizer, cut: int | None) -> bool:
    """Return whether `values` supports this quantiser."""
    return rotates(how, cut) and how.tile == (1, BLOCK)


def of_rotated(
    how: Quantizer,
    x: Tensor,
    signs: Tensor | None,
    rotation: int,
    seed: Tensor | None,
    origin: Tensor | None,
    shared: Shared | None,
) -> Quantized:
    """Return codes of x [m, k] after the transform. signs: seed of the signs, None for +1. rotation: block size, 0 for
    none. Other arguments as in a quantiser's call. Requires `rotates`.
    """
    if how.correction is Correction.GROUP:
        return how.of_rotated(x, signs, rotation, seed, origin, shared)
    kernel, rule = how.kernel("quantize_nvfp4", x.device), (how.tile, how.range_share, how.rounding.name)
    codes, scale, block, tensor = kernel(x, *rule, seed, origin, signs, rotation)
    return how.wrap(codes, scale, {"block": block, "tensor": tensor})


def values(
    how: Quantizer,
    x: Tensor,
    signs: Tensor | None,
    rotation: int,
    seed: Tensor | None,
    origin: Tensor | None,
    shared: Shared | None,
) -> Quantized:
    """Return BF16 values [m, k] and the outer scale [1, 1]. Arguments as in `of_rotated`. Requires `makes_values`."""
    if how.correction is Correction.GROUP:
        top = torch.ops.lowprec.rotated_amax(x, signs, rotation)
        top = top if shared is None else shared.global_amax(top)
        return Quantized(*torch.ops.lowprec.round_eden(x, top, signs, rotation, seed, origin))
    kernel = how.kernel("round_nvfp4", x.device)
    return Quantized(*kernel(x, how.range_share, how.rounding.name, seed, origin, signs, rotation))
