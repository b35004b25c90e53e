"""Block scales on the ladder {1, 1.25, 1.5} 2^e, with which E2M1 codes fold into E4M3 carriers, and a factor per row.

    b      smallest rung with 6 L_b >= max |x| of the block, at least 2^(e_row - span)
    s      the one of L_(b-1), L_b, L_(b+1) with the least error (`candidates`); of equal errors the larger one
    q      RN_E2M1(x / s), at most 6                          x / s: a product with the rounded inverse of the rung
    carrier = q (s / 2^e_row) 2^5 in E4M3, exact for a span of up to 11;    row scale 2^(e_row - 5)

e_row is the exponent of the first rung for the row's largest magnitude. "FOLD3" is the combination of blocks of 1x16,
three candidates by squared error, and a span of 11. Products of the three mantissas of rungs and the two of E2M1 fit
the four bits of E4M3.

Errors of candidates are computed in half precision, in the order of halving (elements j and j + 8, then j and j + 4,
..): a relative error of 2^-11 is irrelevant for the choice, and a GPU processes two elements per instruction.

The factor of a row is EDEN's (arXiv 2601.22813), one for all of k: c = sum y^2 / sum y q s makes <y, c q s> = |y|^2.
Sums of a block are FP32 in the order of halving, in units of 4^e_row. Sums over blocks are of multiples of 2^-28 of
that unit, which are exact in any order, and also over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.exponents import exp2_int, exponent
from lowprec_train.ops.formats import E2M1, E4M3
from lowprec_train.ops.reference import divide, hadamard, pack_e2m1, spread, tile_amax, to_float, unpack_e2m1
from lowprec_train.ops.rounding import encode, round_to
from lowprec_train.ops.schema import tile_shape

MANTISSAS = (1.0, 1.25, 1.5)
INVERSES = (1.0, 0.8, 1 / 1.5)  # of MANTISSAS, rounded to FP32
LOWEST, HIGHEST = 3 * -121, 3 * 125 + 2  # rung numbers, 3 e + place: row scales and inverses are normal numbers
TOP = 5  # exponent of a row's largest rung in a carrier: 6 * 2 * 2^5 fits
SPAN = 11  # binades below it in which codes are exact carrier values
BLOCK = 16  # elements of a FOLD3 block
SUM_BITS = 28  # sums of blocks are multiples of 2^-28
CANDIDATES = ("none", "mse", "mae", "max")


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


def rung_inverse(rung: Tensor) -> Tensor:
    """Return the factor of x before rounding, FP32."""
    e, place = _exponent_and_place(rung)
    return exp2_int(-e) * _table(INVERSES, place)


def halving(x: Tensor, join=torch.add) -> Tensor:  # type: ignore[no-untyped-def]
    """Reduce the last dimension (a power of two) by `join`: j with j + n / 2, then j with j + n / 4, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = join(x[..., :half], x[..., half:])
    return x[..., 0]


def _candidate_error(size: Tensor, ratio: Tensor, inverse: Tensor, by: str) -> Tensor:
    """Return the error of a candidate, FP32. size: FP16 magnitudes of a block in the last dimension, in units of a
    power of two; ratio: the candidate's scale in that unit; inverse: 1 / ratio.
    """
    place = size * inverse.half().unsqueeze(-1)
    off = round_to(place.float().clamp_max(6.0), E2M1).half() - place
    if by == "mse":
        return halving(off * off).float() * ratio * ratio
    return halving(off.abs(), torch.add if by == "mae" else torch.maximum).float() * ratio


def _best_rung(x: Tensor, rung: Tensor, floor: Tensor, by: str) -> Tensor:
    """Return the rung with the least error of `rung` and its neighbours, at least `floor`. x [m, tiles, n]."""
    unit = _exponent_and_place(rung)[0]
    size = (x.abs() * exp2_int(-unit).unsqueeze(-1)).half()
    found, least = rung, None
    for step in (1, 0, -1):
        candidate = torch.maximum(rung + step, floor)
        e, place = _exponent_and_place(candidate)
        shift = exp2_int(e - unit)
        error = _candidate_error(size, shift * _table(MANTISSAS, place), _table(INVERSES, place) / shift, by)
        better = error < least if least is not None else torch.ones_like(error, dtype=torch.bool)
        found, least = torch.where(better, candidate, found), error if least is None else torch.minimum(error, least)
    return found


def row_exponent(tops: Tensor) -> Tensor:
    """Return e_row [m, 1] from the largest magnitudes of rows [m, 1]."""
    return _exponent_and_place(first_rung(tops))[0]


def below_floor(amax: Tensor, row: Tensor, exponent_span: int) -> Tensor:
    """Return which blocks, from their amax [m, tiles], have a larger rung than their own because of the span. row
    [m, 1]: scales 2^(e_row - 5).
    """
    return first_rung(amax) < 3 * (exponent(row) + TOP - exponent_span)


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
    floor = (3 * (e_row - exponent_span)).clamp_min(LOWEST) if exponent_span else torch.full_like(e_row, LOWEST)
    rung = torch.maximum(first_rung(amax), floor)
    if candidates != "none":
        rung = _best_rung(x.unflatten(1, (-1, width)), rung, floor, candidates)
    lost = ~(tops if exponent_span else amax).isfinite()
    v = x * spread(rung_inverse(rung), x.shape, (1, width))
    codes = encode(torch.where(spread(lost.expand_as(rung), x.shape, (1, width)), torch.nan, v), E2M1)
    row = exp2_int(e_row - TOP).masked_fill(~tops.isfinite(), torch.nan)
    return codes, rung_value(rung).masked_fill(lost, torch.nan), row


def row_sums(x, codes, scale, row):  # type: ignore[no-untyped-def]
    """Return FP64 [m, 2]: sum y^2 and sum y q s of each row of x [m, k], as integers in units of 2^-28 4^e_row."""
    width, unit = x.shape[1] // scale.shape[1], row * 2.0**TOP
    own = (x.float() * (1.0 / unit)).unflatten(1, (-1, width))
    made = codes.float().unflatten(1, (-1, width)) * (scale * (1.0 / unit)).unsqueeze(-1)
    blocks = torch.stack((halving(own * own), halving(own * made)), dim=1)
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


def rotate_fold_ladder(  # type: ignore[no-untyped-def]
    x, scale, transposed, signs, rotation, tile, candidates, exponent_span, corrected
):
    """Rotate, round and fold x [m, k] or its transpose in one op. With `scale` ([1, 1] or [m, 1]) x is E4M3 codes,
    which are first decoded to BF16. signs: seed of the rotation's signs; rotation: its block size, 0 for none.
    corrected: multiply row scales by their factor.
    """
    if scale is not None:
        x = (to_float(x) * scale).to(torch.bfloat16)
    x = x.t().contiguous() if transposed else x
    x = hadamard(x, signs, rotation) if rotation else x
    codes, block, row = quantize_ladder(x, None, tile, candidates, exponent_span)
    factor = row_factor(row_sums(x, codes, block, row)) if corrected else None
    return fold_ladder(codes, block, row, factor)
