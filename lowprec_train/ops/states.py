"""COAT's dynamic range expansion (arXiv 2410.19313, section 4): FP8 codes of optimizer moments in groups whose values
span fewer binades than the format.

For a group with largest magnitude A and smallest non-zero magnitude a, and a format with largest value M:

    k = floor(16 log2(M^2 / 2) / log2(A / a)) / 16, in [1/16, 64]       the exponent that expands a .. A to the format
    c = sqrt(A) sqrt(a)                                                  the centre
    s = (A / c)^k / M                                                    the scale
    code = round(sign(x) M (|x| / A)^k) = round(sign(x) (|x| / c)^k / s)       x ~ sign(code) |code s|^(1/k) c

So A becomes the code M and a a code of at least about 2 / M, two and a half subnormal steps: nothing is flushed. Zeros
have the code zero and are ignored for a; magnitudes below 2^-126 count as zeros. Equal magnitudes have k = 64, a group
of zeros has k = 1, c = 1. A group with Inf or NaN decodes to NaN.

Groups have `group` elements along the last dimension, and restart at each of the row's `segments` (the last group of a
segment may be shorter). A whole row has 8 segments if 8 divides it, a rank with half of it has 4 of them: codes and
scales are split in the same way over up to 8 ranks, and the split changes no bits.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.powers import exp2_parts, log2, log2_parts
from lowprec_train.ops.reference import TINY, divide, exp2_int, square_root
from lowprec_train.ops.rounding import encode
from lowprec_train.ops.schema import segment_groups

STEPS = 16  # k is a multiple of 1 / STEPS
LARGEST_EXPONENT = 64.0


def quantize_expanded(x, format, group, segments):  # type: ignore[no-untyped-def]
    """Return codes [n, k] of x [n, k], and scale, exponent, center of every group, FP32 [n, segments * groups]."""
    v = _grouped(x.float(), group, segments)
    magnitude = v.abs()
    amax = magnitude.amax(dim=2)
    finite = amax.isfinite()
    present = (magnitude >= TINY) & finite.unsqueeze(2)
    amax = torch.where(finite & (amax >= TINY), amax, 1.0)
    amin = torch.where(present, magnitude, torch.inf).amin(dim=2).minimum(amax)
    log_range = _log2_quotient(amax, amin)
    k = _exponent(log_range, format)
    power = k.unsqueeze(2) * _log2_quotient(torch.where(present, magnitude, 1.0), amax.unsqueeze(2))
    codes = torch.where(present, _exp2_times(power, parse_format(format).max), 0.0).copysign(v)
    center = torch.where(amin == amax, amax, square_root(amax) * square_root(amin))
    scale = divide(_exp2_times(k * log_range * 0.5, 1.0), parse_format(format).max)
    scale, center = (torch.where(finite, each, torch.nan) for each in (scale, center))
    k = torch.where(present.any(dim=2), k, 1.0)
    return encode(_ungrouped(codes, x.shape[1], segments), parse_format(format)), scale, k, center


def dequantize_expanded(codes, scale, exponent, center, format, group, segments):  # type: ignore[no-untyped-def]
    """Return sign(code) |code * scale|^(1 / exponent) * center, FP32 [n, k]: at least 2^-126 except for code zero, NaN
    if center is not finite.
    """
    c = _grouped(codes.view(torch.uint8), group, segments)
    finite = center.isfinite()
    log_code = _code_log2(format, codes.device)[(c & 0x7F).int()]
    log_scale = log2(torch.where(finite, scale, 1.0))
    power = (log_code + log_scale.unsqueeze(2)) * divide(torch.ones_like(exponent), exponent).unsqueeze(2)
    magnitude = torch.where((c & 0x7F) == 0, 0.0, _exp2_times(power, center.unsqueeze(2)).clamp_min(TINY))
    magnitude = torch.where(finite.unsqueeze(2), magnitude, torch.nan)
    return _ungrouped(torch.where(c < 0x80, magnitude, -magnitude), codes.shape[1], segments)


def _grouped(x: Tensor, group: int, segments: int) -> Tensor:
    """Reshape [n, k] to [n, segments * groups, group], padded with zeros."""
    groups = segment_groups(x.shape[1], group, segments)
    x = x.unflatten(1, (segments, x.shape[1] // segments))
    return F.pad(x, (0, groups * group - x.shape[2])).reshape(x.shape[0], segments * groups, group)


def _ungrouped(x: Tensor, columns: int, segments: int) -> Tensor:
    whole = x.reshape(x.shape[0], segments, x.shape[1] // segments * x.shape[2])
    return whole[:, :, : columns // segments].reshape(x.shape[0], columns)


def _log2_quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return log2(a / b) of normal positive numbers; exactly 0 if they are equal."""
    (whole_a, part_a), (whole_b, part_b) = log2_parts(a), log2_parts(b)
    return (whole_a - whole_b).float() + (part_a - part_b)


def _exponent(log_range: Tensor, format: str) -> Tensor:
    bound = math.log2(parse_format(format).max ** 2 / 2)
    steps = divide(torch.full_like(log_range, STEPS * bound), log_range.clamp_min(TINY)).floor()
    return steps.clamp(1.0, STEPS * LARGEST_EXPONENT) * (1 / STEPS)


def _exp2_times(power: Tensor, factor: Tensor | float) -> Tensor:
    """Return 2^power * factor; the power of two is applied in halves, which overflow only if the product does."""
    whole, part = exp2_parts(power)
    half = whole >> 1
    return part * factor * exp2_int(half) * exp2_int(whole - half)


@cache
def _code_log2(format: str, device: torch.device) -> Tensor:
    """Return log2 of codes without sign, FP32 [128]: 0 at zero, NaN if the code is not finite."""
    values = torch.arange(128, dtype=torch.uint8).view(parse_format(format).carrier).float().tolist()
    return torch.tensor([0.0 if v == 0 else math.log2(v) if v < math.inf else math.nan for v in values], device=device)
