"""Block scales on the ladder {1, 1.25, 1.5} 2^e, with which E2M1 codes fold into E4M3 carriers, and a factor per row.

    b      smallest rung with 6 L_b >= max |x| of the block, at least 2^(e_row - span)
    s      the one of L_(b-1), L_b, L_(b+1), L_(b+2) with the least error (`candidates`); of equal errors the largest
    q      RN_E2M1(x / s), at most 6
    carrier = q (s / 2^e_row) 2^5 in E4M3, exact for a span of up to 11;    row scale 2^(e_row - 5)

e_row is the exponent of the first rung for the row's largest magnitude. "FOLD3" is the combination of blocks of 1x16,
candidates by squared error, and a span of 11. Products of the three mantissas of rungs and the two of E2M1 fit the four
bits of E4M3.

A block's arithmetic is in half precision, in which a GPU computes two elements per instruction: magnitudes in units of
b's power of two, their products with the inverse of a rung, errors, and the sums below. Its relative error of 2^-11
moves no code that is not next to a tie, and exact ties stay ties. A sum over a block is two chains of fused
multiply-adds, over its even and its odd elements, and the sum of both.

The factor of a row is EDEN's (arXiv 2601.22813), one for all of k: c = sum y^2 / sum y q s makes <y, c q s> = |y|^2.
Sums of blocks are in units of 4^e_row, truncated to multiples of 2^-16, which are exact in any order, and also over
ranks.

A rotation before rounding is also in half precision (`hadamard_half`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.exponents import exp2_int, exponent
from lowprec_train.ops.formats import E2M1, E4M3
from lowprec_train.ops.reference import (
    divide,
    normalized,
    pack_e2m1,
    random_signs,
    spread,
    tile_amax,
    to_float,
    unpack_e2m1,
)
from lowprec_train.ops.rounding import encode, round_to
from lowprec_train.ops.schema import tile_shape

MANTISSAS = (1.0, 1.25, 1.5)
INVERSES = (1.0, 0.8, 1 / 1.5)  # of MANTISSAS; rounded to half, they map exact ties to exact ties
LOWEST = 3 * -121  # rung numbers, 3 e + place: row scales are normal numbers,
HIGHEST = 3 * 125 + 2  # and so are rungs two above
STEPS = (2, 1, 0, -1)  # candidates, relative to the first rung
TOP = 5  # exponent of a row's first rung in a carrier: 6 * 1.5 * 2^5, or 4 * 2.5 * 2^5 two rungs above, fits
SPAN = 11  # binades below it in which codes are exact carrier values
BLOCK = 16  # elements of a FOLD3 block
WIDEST = 256  # elements of a block whose sums fit half precision
SUM_BITS = 16  # sums of blocks are multiples of 2^-16
CANDIDATES = ("none", "mse", "mae", "max")
ROTATED_TOP = 6  # exponent of the largest magnitude before butterflies: sums of 256 fit half precision
MOST_SHIFT = 110  # binades by which a group is enlarged before butterflies: what it is divided by stays normal


def _table(values: tuple[float, ...], place: Tensor) -> Tensor:
    """Return values[place] in FP32, place in 0..2."""
    first, second, third = values
    return torch.where(place == 0, first, torch.where(place == 1, second, third)).float()


def _exponent_and_place(rung: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exponent, place of the mantissa) of rung numbers."""
    e = torch.div(rung, 3, rounding_mode="floor")
    return e, rung - 3 * e


def first_rung(amax: Tensor) -> Tensor:
    """Return the number of the first rung L with 6 L >= amax: 6 L has the mantissas 1.5, 1.875 and 1.125."""
    mantissa = amax.contiguous().view(torch.int32) & 0x7FFFFF
    rung = 3 * (exponent(amax) - 2) - 1
    for limit in (0x100000, 0x400000, 0x700000):
        rung = rung + (mantissa > limit)
    return rung.clamp(LOWEST, HIGHEST)


def rung_value(rung: Tensor) -> Tensor:
    """Return the scale of a rung, FP32."""
    e, place = _exponent_and_place(rung)
    return exp2_int(e) * _table(MANTISSAS, place)


def _inverse(rung: Tensor, unit: Tensor) -> Tensor:
    """Return 2^unit / rung in half precision."""
    e, place = _exponent_and_place(rung)
    return (exp2_int(unit - e) * _table(INVERSES, place)).half()


def fused_half(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a b + c, rounded once. a, b, c: half precision; FP64 holds the exact result."""
    exact = torch.addcmul(c.double(), a.double(), b.double())
    binade = (exact.view(torch.int64) & (2047 << 52)).clamp_min(1023 - 14 << 52)
    magic = (binade + (52 - 10 << 52 | 1 << 51)).view(torch.float64)  # its last bit is half precision's
    return ((exact + magic) - magic).half()


def chained(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a b over the last dimension (even) in half precision: fused multiply-adds along the even and
    the odd elements, then both.
    """
    a, b = torch.broadcast_tensors(a, b)
    total = torch.zeros_like(a[..., :2])
    for i in range(0, a.shape[-1], 2):
        total = fused_half(a[..., i : i + 2], b[..., i : i + 2], total)
    return total[..., 0] + total[..., 1]


def _sizes(x: Tensor, unit: Tensor) -> Tensor:
    """Return |x| / 2^unit in half precision. x [m, tiles, n], unit [m, tiles]."""
    return (x.abs() * exp2_int(-unit).unsqueeze(-1)).half()


def _codes(size: Tensor, inverse: Tensor, doubled: bool = False) -> tuple[Tensor, Tensor]:
    """Return size * inverse and its E2M1 magnitude, both in half precision. doubled: the grid is twice E2M1's."""
    place, grid = size * inverse.unsqueeze(-1), 2.0 if doubled else 1.0
    return place, (round_to((place.float() / grid).clamp_max(6.0), E2M1) * grid).half()


def _candidate_error(size: Tensor, rung: Tensor, unit: Tensor, step: int, by: str) -> Tensor:
    """Return the error of the rung `step` above `rung`, FP32, in units of 2^unit. The rung two above has twice the
    scale of the rung below: its codes are those of the rung below on a grid twice as wide.
    """
    at = rung + (-1 if step == 2 else step)
    e, place = _exponent_and_place(at)
    ratio = exp2_int(e - unit) * _table(MANTISSAS, place)
    value, rounded = _codes(size, _inverse(at, unit), doubled=step == 2)
    off = (rounded - value).abs()
    if by == "max":
        return off.amax(dim=-1).float() * ratio
    return chained(off, torch.ones_like(off)).float() * ratio if by == "mae" else chained(off, off).float() * ratio**2


def _best_rung(size: Tensor, rung: Tensor, floor: Tensor, unit: Tensor, by: str) -> Tensor:
    """Return the rung with the least error of `rung` and its neighbours, at least `floor`."""
    found, least = rung + STEPS[0], _candidate_error(size, rung, unit, STEPS[0], by)
    for step in STEPS[1:]:
        error = _candidate_error(size, rung, unit, step, by)
        better = (error < least) & (rung + step >= floor)
        found, least = torch.where(better, rung + step, found), torch.where(better, error, least)
    return found


def row_exponent(tops: Tensor) -> Tensor:
    """Return e_row [m, 1] from the largest magnitudes of rows [m, 1]."""
    return _exponent_and_place(first_rung(tops))[0]


def below_floor(amax: Tensor, row: Tensor, exponent_span: int) -> Tensor:
    """Return which blocks, from their amax [m, tiles], have a larger rung than their own because of the span. row
    [m, 1]: scales 2^(e_row - 5).
    """
    return first_rung(amax) < 3 * (exponent(row) + TOP - exponent_span)


def _floor(e_row: Tensor, exponent_span: int) -> Tensor:
    """Return the lowest rung of each row [m, 1]."""
    return (3 * (e_row - exponent_span)).clamp_min(LOWEST) if exponent_span else torch.full_like(e_row, LOWEST)


def quantize_ladder(x, tops, tile, candidates, exponent_span):  # type: ignore[no-untyped-def]
    """Return E2M1 codes of x [m, k], the rung of each tile (1, n), and 2^(e_row - 5) [m, 1]. tops [m, 1]: amax of whole
    rows, of which x may be a part; None computes them from x. exponent_span 0 means unbounded. Raises ValueError for
    tiles of several rows or whose columns are not a power of two, and for unknown `candidates`.
    """
    width = tile_shape(x.shape[0], x.shape[1], tile)[1]
    if tile[0] != 1 or width & (width - 1):
        raise ValueError(f"rungs belong to tiles of one row and a power of two of columns, not to {tuple(tile)}")
    if candidates not in CANDIDATES:
        raise ValueError(f"candidates must be one of {', '.join(CANDIDATES)}, not {candidates!r}")
    x = x.float()
    amax = tile_amax(x, (1, width))
    tops = amax.amax(dim=1, keepdim=True) if tops is None else tops
    e_row = row_exponent(tops)
    floor = _floor(e_row, exponent_span)
    rung = torch.maximum(first_rung(amax), floor)
    unit = _exponent_and_place(rung)[0]
    size = _sizes(x.unflatten(1, (-1, width)), unit)
    if candidates != "none":
        rung = _best_rung(size, rung, floor, unit, candidates)
    lost = ~(tops if exponent_span else amax).isfinite()
    rounded = _codes(size, _inverse(rung, unit))[1].float().flatten(1).copysign(x) + 0.0  # zeros are positive
    codes = encode(torch.where(spread(lost.expand_as(rung), x.shape, (1, width)), torch.nan, rounded), E2M1)
    row = exp2_int(e_row - TOP).masked_fill(~tops.isfinite(), torch.nan)
    return codes, rung_value(rung).masked_fill(lost, torch.nan), row


def row_sums(x, codes, scale, row, exponent_span):  # type: ignore[no-untyped-def]
    """Return FP64 [m, 2]: sum y^2 and sum y q s of each row of x [m, k], as integers in units of 2^-16 4^e_row. Other
    arguments as for and from `quantize_ladder`.
    """
    width, e_row, x = x.shape[1] // scale.shape[1], exponent(row) + TOP, x.float()
    rung = torch.maximum(first_rung(tile_amax(x, (1, width))), _floor(e_row, exponent_span))
    unit = _exponent_and_place(rung)[0]
    size, rounded = _sizes(x.unflatten(1, (-1, width)), unit), codes.float().abs().half().unflatten(1, (-1, width))
    own, made = chained(size, size).float(), chained(size, rounded).float()
    times = exp2_int((unit - e_row).clamp(-60, 60))
    blocks = torch.stack((own * times * times, made * times * (scale * (1.0 / (row * 2.0**TOP)))), dim=1)
    return (blocks * 2.0**SUM_BITS).trunc().double().sum(dim=2)


def row_factor(sums: Tensor) -> Tensor:
    """Return c [m, 1] in FP32 from sums [m, 2]; 1 if sum y q s is 0."""
    own, made = sums.split(1, dim=1)
    return torch.where(made == 0, 1.0, own / made).float()


def fold_ladder(codes, scale, row, factor):  # type: ignore[no-untyped-def]
    """Return E4M3 carriers [m, k] and a scale per row [m, 1] from outputs of `quantize_ladder` with a span of up to 11.
    factor [m, 1] or None: multiplied into the scale.
    """
    shift = spread(scale * (1.0 / row), codes.shape, (1, codes.shape[1] // scale.shape[1]))
    return encode(codes.float() * shift, E4M3), row * 1.0 if factor is None else row * factor


def pack_ladder(carriers):  # type: ignore[no-untyped-def]
    """Factor E4M3 carriers [m, k] with blocks of 16 into E2M1 codes, two per byte, and an E4M3 scale for each block,
    whose products are the carriers. Scales of blocks without such factors are NaN.
    """
    blocks = to_float(carriers).unflatten(1, (-1, BLOCK))
    top = blocks.abs().amax(dim=-1)
    found, codes = torch.full_like(top, torch.nan), torch.zeros_like(blocks)
    for place in E2M1.grid[1:]:  # code of the largest magnitude; the last match has the smallest scale
        scale = torch.where(top == 0, 1.0, encode(divide(top, place), E4M3).float())
        tried = encode(divide(blocks, scale.double().unsqueeze(-1)), E2M1).float()
        serves = (tried * scale.unsqueeze(-1) == blocks).all(dim=-1)
        found, codes = torch.where(serves, scale, found), torch.where(serves.unsqueeze(-1), tried, codes)
    return pack_e2m1(codes.flatten(1).to(torch.float8_e4m3fn)), found.to(torch.float8_e4m3fn)


def unpack_ladder(packed, scale):  # type: ignore[no-untyped-def]
    """Return the carriers from the outputs of `pack_ladder`."""
    codes = unpack_e2m1(packed)
    return encode(codes.float() * spread(scale.float(), codes.shape, (1, BLOCK)), E4M3)


def hadamard_half(x, seed, block, gain):  # type: ignore[no-untyped-def]
    """Apply random signs as `hadamard`, then the Walsh-Hadamard transform of each block in half precision, times
    `gain`, a power of two.

    A block is first multiplied by a power of two for which its amax is in [64, 128), and is divided by it after the
    butterflies. Returns FP32 [m, k]: numbers of half precision times powers of two. block: at most 256.
    """
    if block > 256:
        raise ValueError(f"half precision holds sums of up to 256 numbers, not of {block}")
    h = x.float().unflatten(1, (-1, block))
    shift = (ROTATED_TOP - exponent(h.abs().amax(dim=-1, keepdim=True))).clamp_max(MOST_SHIFT)
    h, stride = (h * random_signs(seed, block) * exp2_int(shift)).half(), 1
    while stride < block:
        a, b = h.unflatten(2, (-1, 2, stride)).unbind(3)
        h, stride = torch.stack((a + b, a - b), dim=3).flatten(2), 2 * stride
    return (h.float() * (exp2_int(-shift) * gain)).flatten(1)


def rotate_fold_ladder(  # type: ignore[no-untyped-def]
    x,
    scale,
    transposed,
    signs,
    rotation,
    gain,
    tile,
    candidates,
    exponent_span,
    corrected,
    after=None,
    rate=None,
    weight=None,
):
    """Rotate, round and fold x [m, k] or its transpose in one op. With `scale` ([1, 1] or [m, 1]) x is E4M3 codes,
    which are first decoded to BF16, or values, which are first rounded to such codes under one scale. signs: seed of
    the rotation's signs; rotation: its block size, 0 for none; gain: as for `hadamard_half`. corrected: multiply row
    scales by their factor. rate [m] and weight [k]: x is the input of an RMSNorm, whose result is rounded
    (`normalized`). Raises ValueError for values and several scales.
    """
    x = x if rate is None else normalized(x, rate, weight)
    if scale is not None:
        if x.dtype != torch.float8_e4m3fn:
            if scale.numel() != 1:
                raise ValueError(f"values are rounded to E4M3 under one scale, not {scale.numel()}")
            x = encode(x.float() * divide(torch.ones_like(scale), scale), E4M3)
        x = (to_float(x) * scale).to(torch.bfloat16)
    x = x.t().contiguous() if transposed else x
    x = hadamard_half(x, signs, rotation, gain) if rotation else x
    codes, block, row = quantize_ladder(x, None, tile, candidates, exponent_span)
    factor = row_factor(row_sums(x, codes, block, row, exponent_span)) if corrected else None
    return fold_ladder(codes, block, row, factor)
