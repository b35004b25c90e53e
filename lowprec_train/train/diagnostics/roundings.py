"""Error figures of one rounding as 0-dim tensors, the same for every format, tile and scale rule.

    sqnr_db             10 log10(sum x^2 / sum (x - x^)^2)              6 dB are one bit
    underflow_pct       non-zero x with x^ = 0; zeros of either sign are not lost
    saturated_pct       |x| > M s, M the format's maximum, s the scale of x's tile: clipped
    nonfinite_pct       x or x^ is NaN or infinite
    scale_spread        log2(largest / smallest s) over the tiles that are not zero
    outlier_pct         x outside of its row's clamp
    clamped_blocks_pct  blocks whose exponent was raised to their row's floor (a quantiser's `exponent_span`)
    stalled_pct         a stored value does not move towards the wanted one: the update is lost (arXiv 2603.16731)

Percentages are of all elements, or of all blocks. A figure that has no number is not finite: SQNR of an exact rounding
(+Inf, or NaN where x is zero) and of non-finite data (nonfinite_pct tells which), scales where every tile is zero, a
clamp or a span that the rounding does not have. Squares are taken of x over its largest power of two: no range is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops.ladder import raised
from lowprec_train.ops.reference import dequantize, exp2_int, exponent, outlier_bounds, spread, tile_amax, tile_scale
from lowprec_train.precision.outliers import OutlierClamp

Figures = dict[str, Tensor]

ROUNDING_OF_SCALES = 1 + 2.0**-20
"""An FP32 scale is itself rounded: a tile's largest value may lie a few units of the last place above M s."""

CLIPPED = 1 + 1 / 8
"""More than half a grid step below the largest code of any format that stores a state (1/14 for E5M2)."""


@torch.no_grad()
def of_operand(x: Tensor, rounded: Quantized, how: Quantizer, clamp: OutlierClamp | None = None) -> Figures:
    """x [m, k] as its quantiser saw it, and what came out.

    With a clamp, `carrier` codes are measured against x, outliers included, and saturate at E4M3's maximum; codes of
    the `residual` variant are measured against the clamped body: what lies outside is kept elsewhere.
    """
    x = x.float()
    body, outliers = _clamped(x, clamp)
    carrier = clamp is not None and clamp.variant == "carrier"
    wanted = x if carrier else body
    got, tile = dequantize(rounded.codes, rounded.scale), _tile(rounded)
    largest = rounded.scale * ((E4M3 if carrier else how.format).max * ROUNDING_OF_SCALES)
    return {
        **_errors(x, wanted, got, wanted.abs() > spread(largest, x.shape, tile)),
        **_scales(tile_amax(body, tile), rounded.scale),
        "outlier_pct": _missing(x) if clamp is None else _percent(outliers),
        "clamped_blocks_pct": _clamped_blocks(tile_amax(body, tile), rounded.scale, how),
    }


@torch.no_grad()
def of_state(before: Tensor, wanted: Tensor, after: Tensor) -> Figures:
    """An optimizer's state: its stored value before a step, the unrounded new one, the stored new one; FP32.

    On a grid that stays, a stalled value keeps its code: rounding is monotone and `before` lies on the grid. Where
    scales move from step to step (range expansion), an unmoved code drifts with its scale, away from what was wanted as
    often as towards it, and the top code of a group follows exactly: so values decide, not codes.

    A state comes without its scales, so `saturated_pct` is a tripwire: non-zero codes of values that lie more than an
    eighth above everything that was stored. The codecs of `optim` choose scales that clip nothing.
    """
    top = after.abs().amax() * CLIPPED
    stalled = (wanted > before) & (after <= before) | (wanted < before) & (after >= before)
    return {
        **_errors(wanted, wanted, after, (after != 0) & (wanted.abs() > top)),
        "stalled_pct": _percent(stalled),
    }


def _errors(x: Tensor, wanted: Tensor, got: Tensor, clipped: Tensor) -> Figures:
    """Of `got` against `wanted`, which is x or what a clamp leaves of it."""
    return {
        "sqnr_db": sqnr_db(wanted, got),
        "underflow_pct": _percent((wanted != 0) & (got == 0)),
        "saturated_pct": _percent(wanted.isfinite() & clipped),
        "nonfinite_pct": _percent(~(x.isfinite() & got.isfinite())),
        "amax": x.abs().amax(),
    }


def sqnr_db(wanted: Tensor, got: Tensor) -> Tensor:
    """Signal over quantisation noise in decibels, 0-dim FP64; +Inf without noise, NaN for zeros and non-finite data."""
    unit = exp2_int((-exponent(wanted.abs().amax())).clamp(-126, 127))
    signal, noise = wanted * unit, (wanted - got) * unit
    power = [(part * part).sum(dtype=torch.float64) for part in (signal, noise)]
    return 10 * torch.log10(power[0] / power[1])


def _clamped(x: Tensor, clamp: OutlierClamp | None) -> tuple[Tensor, Tensor]:
    """The body of x, and which elements lie outside of it."""
    if clamp is None:
        return x, x.new_zeros((), dtype=torch.bool)
    low, high = outlier_bounds(x, clamp.clipped(x.shape[1]))
    return torch.minimum(torch.maximum(x, low), high), (x < low) | (x > high)


def _tile(rounded: Quantized) -> tuple[int, int]:
    (rows, columns), (tall, wide) = rounded.codes.shape, rounded.scale.shape
    return rows // tall, columns // wide


def _scales(amax: Tensor, scale: Tensor) -> Figures:
    """Of tiles that are neither zero, whose scale means nothing, nor non-finite."""
    used = (amax > 0) & amax.isfinite()
    smallest = torch.where(used, scale, math.inf).amin()
    largest = torch.where(used, scale, -math.inf).amax()
    ratio = torch.log2(largest.double() / smallest.double())
    return {"scale_min": smallest, "scale_max": largest, "scale_spread": ratio}


def _clamped_blocks(amax: Tensor, scale: Tensor, how: Quantizer) -> Tensor:
    """Share of non-zero blocks that the span gave a larger scale than their own rule; zero blocks lose nothing."""
    if not how.exponent_span:
        return _missing(amax)
    if how.scale is ScaleRule.LADDER:
        return _percent((amax > 0) & raised(amax, how.exponent_span))
    own, _ = tile_scale(amax, how.format, how.scale.value, how.range_share, 0)
    return _percent((amax > 0) & (own < scale))


def _percent(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64) * (100 / mask.numel())


def _missing(like: Tensor) -> Tensor:
    return like.new_full((), math.nan)
