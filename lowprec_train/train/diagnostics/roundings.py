"""Error figures of one rounding as 0-dim tensors, for every format, tile and scale rule.

    sqnr_db             10 log10(sum x^2 / sum (x - x^)^2)              6 dB are one bit
    underflow_pct       non-zero x with x^ = 0; zeros of either sign are not lost
    saturated_pct       |x| > M s, M the format's maximum, s the scale of x's tile: clipped
    nonfinite_pct       x or x^ is NaN or infinite
    scale_spread        log2(largest / smallest s) over the tiles that are not zero
    outlier_pct         x outside of its row's clamp
    clamped_blocks_pct  blocks whose exponent was raised to their row's floor (a quantiser's `exponent_span`)
    stalled_pct         a stored value does not move towards the wanted one: the update is lost (arXiv 2603.16731)

Percentages are of all elements, or of all blocks. A figure without a value is not finite: SQNR of an exact rounding
(+Inf, or NaN if x is zero) and of non-finite data (nonfinite_pct is above 0), scales if every tile is zero, figures of
a clamp or a span that the rounding does not have. x is divided by its largest power of two before it is squared, so
squares neither overflow nor underflow.

A `Tally` holds the sums and maxima of which figures are computed. Tallies of the shards of a tensor add up to the tally
of the whole tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops.ladder import below_floor
from lowprec_train.ops.reference import dequantize, exp2_int, exponent, spread, tile_amax, tile_scale
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.split import Split

Figures = dict[str, Tensor]

ROUNDING_OF_SCALES = 1 + 2.0**-20
"""An FP32 scale is itself rounded: a tile's largest value may be a few units in the last place above M s."""

CLIPPED = 1 + 1 / 8
"""More than half a grid step below the largest code of any format that stores a state (1/14 for E5M2)."""


@dataclass(frozen=True)
class Tally:
    """sums: FP64, are added over the shards of a tensor. tops: FP32, of which the maximum is taken. All 0-dim."""

    sums: dict[str, Tensor]
    tops: dict[str, Tensor]

    def figures(self) -> Figures:
        """Return the figures, by name."""
        sums, tops = self.sums, self.tops
        found = {
            "sqnr_db": _decibels(sums["signal"], sums["noise"]),
            **{f"{name}_pct": self._percent(name, "elements") for name in ("underflow", "saturated", "nonfinite")},
            "amax": tops["amax"],
        }
        if "stalled" in sums:
            return found | {"stalled_pct": self._percent("stalled", "elements")}
        smallest, largest = -tops["minus_scale_min"], tops["scale_max"]
        return found | {
            "scale_min": smallest,
            "scale_max": largest,
            "scale_spread": torch.log2(largest.double() / smallest.double()),
            "outlier_pct": self._percent("outliers", "elements"),
            "clamped_blocks_pct": self._percent("clamped_blocks", "blocks"),
        }

    def _percent(self, count: str, of: str) -> Tensor:
        return 100 * self.sums[count] / self.sums[of]


@torch.no_grad()
def tally_operand(
    x: Tensor,
    rounded: Quantized,
    quantizer: Quantizer,
    clamp: OutlierClamp | None = None,
    split: Split | None = None,
) -> Tally:
    """Return the tally of an operand x [m, k], or of this rank's shard of it, and of `rounded`, the quantiser's result
    for it. split: if its columns are sharded and `clamp` needs the quantiles of whole rows; collective over its group.

    With a clamp, `carrier` codes are compared with x, outliers included; their maximum is E4M3's. Codes of the
    `residual` variant are compared with the clamped body, because the outliers are stored elsewhere.
    """
    x = x.float()
    body, outliers = _clamped(x, clamp, split)
    carrier = clamp is not None and clamp.variant == "carrier"
    wanted = x if carrier else body
    got, tile = dequantize(rounded.codes, rounded.scale), _tile(rounded)
    largest = rounded.scale * ((E4M3 if carrier else quantizer.format).max * ROUNDING_OF_SCALES)
    sums, amax = _errors(x, wanted, got, wanted.abs() > spread(largest, x.shape, tile))
    tiles = tile_amax(wanted, tile)
    sums |= {
        "outliers": _missing(x) if clamp is None else _count(outliers),
        "clamped_blocks": _clamped_blocks(tiles, rounded, quantizer),
        "blocks": _number(tiles.numel(), x),
    }
    return Tally(sums, {"amax": amax} | _scales(tiles, rounded.scale))


@torch.no_grad()
def tally_state(before: Tensor, wanted: Tensor, after: Tensor) -> Tally:
    """Return the tally of an optimizer state or of a shard, which may be empty: its stored value `before` a step, the
    new value before rounding (`wanted`) and the new stored value (`after`); FP32.

    If scales do not change from step to step, a stalled value keeps its code: rounding is monotone, and `before` is on
    the grid. Range expansion changes the scales of its groups at every step. An unchanged code then changes its value,
    as often away from the wanted value as towards it, and the largest code of a group is always updated. So values are
    compared, not codes.

    The observer has no scales, so `saturated` counts non-zero codes of values that are more than an eighth above the
    largest stored value of the shard. The codecs of `optim` choose scales that clip nothing: 0 unless a codec is wrong.
    """
    if not wanted.numel():
        names = ("elements", "signal", "noise", "underflow", "saturated", "nonfinite", "stalled")
        return Tally({name: _number(0, wanted) for name in names}, {"amax": wanted.new_zeros(())})
    top = after.abs().amax() * CLIPPED
    stalled = (wanted > before) & (after <= before) | (wanted < before) & (after >= before)
    sums, amax = _errors(wanted, wanted, after, (after != 0) & (wanted.abs() > top))
    return Tally(sums | {"stalled": _count(stalled)}, {"amax": amax})


def _errors(x: Tensor, wanted: Tensor, got: Tensor, clipped: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums of the errors of `got`, and the amax of x. wanted: x, or x after a clamp."""
    signal, noise = _energies(wanted, got)
    return {
        "elements": _number(x.numel(), x),
        "signal": signal,
        "noise": noise,
        "underflow": _count((wanted != 0) & (got == 0)),
        "saturated": _count(wanted.isfinite() & clipped),
        "nonfinite": _count(~(x.isfinite() & got.isfinite())),
    }, x.abs().amax()


def sqnr_db(wanted: Tensor, got: Tensor) -> Tensor:
    """Return signal over quantisation noise in decibels, 0-dim FP64; +Inf without noise, NaN for zeros and non-finite
    data.
    """
    return _decibels(*_energies(wanted, got))


def _decibels(signal: Tensor, noise: Tensor) -> Tensor:
    return 10 * torch.log10(signal / noise)


def _energies(wanted: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of wanted^2 and (wanted - got)^2, FP64. FP32 squares are of numbers up to 2."""
    unit = exp2_int((-exponent(wanted.abs().amax())).clamp(-126, 127))
    parts, back = (wanted * unit, (wanted - got) * unit), unit.double().reciprocal().square()
    signal, noise = ((part * part).sum(dtype=torch.float64) * back for part in parts)
    return signal, noise


def _clamped(x: Tensor, clamp: OutlierClamp | None, split: Split | None) -> tuple[Tensor, Tensor]:
    """Return the body of x, and which elements are outside of it."""
    if clamp is None:
        return x, x.new_zeros((), dtype=torch.bool)
    low, high = clamp.bounds(x, split)
    return torch.minimum(torch.maximum(x, low), high), (x < low) | (x > high)


def _tile(rounded: Quantized) -> tuple[int, int]:
    (rows, columns), (tall, wide) = rounded.codes.shape, rounded.scale.shape
    return rows // tall, columns // wide


def _scales(amax: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Return the largest and minus the smallest scale of the tiles that are finite and not zero."""
    used = (amax > 0) & amax.isfinite() & scale.isfinite()
    return {
        "minus_scale_min": -torch.where(used, scale, math.inf).amin(),
        "scale_max": torch.where(used, scale, -math.inf).amax(),
    }


def _clamped_blocks(amax: Tensor, rounded: Quantized, quantizer: Quantizer) -> Tensor:
    """Return the number of non-zero blocks that have a larger scale than their own amax needs, because of the span."""
    if not quantizer.exponent_span:
        return _missing(amax)
    if quantizer.scale is ScaleRule.LADDER:
        raised = below_floor(amax, rounded.parts["row"], quantizer.exponent_span)
    else:
        own, _ = tile_scale(amax, quantizer.format, quantizer.scale.value, quantizer.range_share, 0)
        raised = own < rounded.scale
    return _count((amax > 0) & raised)


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


def _number(value: int, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


def _missing(like: Tensor) -> Tensor:
    return torch.full((), math.nan, dtype=torch.float64, device=like.device)
