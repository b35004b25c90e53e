"""Quantise many matrices under one scale each, in one launch for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.numerics.quantizer import WHOLE, Quantized, Quantizer, ScaleRule
from lowprec_train.ops import library

ALIGNED = 4  # FP32 numbers in 16 bytes, to which cuBLAS wants a scale aligned


def quantizes_lists(quantizer: Quantizer, device: torch.device) -> bool:
    """Return whether `quantize_lists` supports a quantiser on a device: one scale a matrix, rounding to nearest."""
    one = quantizer.format.scaled and quantizer.tile == WHOLE and not quantizer.exponent_span
    plain = not quantizer.stochastic and quantizer.scale not in (ScaleRule.NVFP4, ScaleRule.LADDER)
    return one and plain and library.knows("quantize_by", device, quantizer.format.name, quantizer.rounding.name)


def amax_all(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each of n contiguous matrices of one dtype, FP32 [n]."""
    amax: Tensor = torch.ops.lowprec.amax_all(list(xs))
    return amax


def quantize_lists(operands: Sequence[tuple[Quantizer, Tensor, Tensor]]) -> list[Quantized]:
    """Quantise contiguous matrices of one dtype, in one launch for each quantiser.

    operands: quantiser, matrix [m, k], and its amax (one FP32 element) or that of the whole of which it is a shard. The
    codes are those of `quantizer(x, shared=...)`, bit for bit.
    """
    places: dict[Quantizer, list[int]] = {}
    for place, (quantizer, _, _) in enumerate(operands):
        places.setdefault(quantizer, []).append(place)
    made: dict[int, Quantized] = {}
    for quantizer, chosen in places.items():
        xs = [operands[place][1] for place in chosen]
        codes = [torch.empty_like(x, dtype=quantizer.format.carrier) for x in xs]
        amax = torch.cat([operands[place][2].flatten() for place in chosen])
        how = (quantizer.format.name, quantizer.scale.value, quantizer.range_share)
        scales = torch.ops.lowprec.quantize_all_by(xs, amax, codes, *how)
        apart = F.pad(scales.unsqueeze(1), (0, ALIGNED - 1))
        for place, each, scale in zip(chosen, codes, apart.unbind(), strict=True):
            made[place] = quantizer.wrap(each, scale[:1].view(1, 1))
    return [made[place] for place in range(len(operands))]
