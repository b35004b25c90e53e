"""Block scales on the ladder {1, 1.25, 1.5} 2^e, whose E2M1 codes fold into E4M3 carriers, and a factor per row.

    b      first rung with 6 L_b >= max |x| of the block, not below 2^(e_row - span)
    s      of L_(b-1), L_b, L_(b+1) the one of least error (`candidates`), the larger one of equals
    q      RN_E2M1(x / s), at most 6                          x / s: a product with the rounded inverse of the rung
    carrier = q (s / 2^e_row) 2^5 in E4M3, exactly, for a span of up to 11;    row scale 2^(e_row - 5)

e_row is the exponent of the rung that the row's largest magnitude asks for. "FOLD3" names the whole: blocks of 1x16,
three candidates by their squared error, a span of 11. The rungs' three mantissas times E2M1's two have no more than
E4M3's four bits.

Errors of candidates are judged in half precision, in the order of halving (elements j and j + 8, then j and j + 4, ..):
2^-11 of an error decides nothing that matters, and a GPU judges two elements an instruction.

The row's factor is EDEN's (arXiv 2601.22813), one for all of k: c = sum y^2 / sum y q s makes <y, c q s> = |y|^2. Sums
of a block are FP32 in the order of halving, in units of 4^e_row; blocks are added as multiples of 2^-28 of that, which
is exact in any order, over ranks too.
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
INVERSES = (1.0, 0.8, 1 / 1.5)  # of them, rounded to FP32
LOWEST, HIGHEST = 3 * -121, 3 * 125 + 2  # rungs by number, 3 e + place: row scales and inverses are normal numbers
TOP = 5  # exponent that a row's largest rung takes in a carrier: 6 * 2 * 2^5 fits
SPAN = 11  # binades below it whose codes are still exact carrier values
BLOCK = 16  # elements of a FOLD3 block
SUM_BITS = 28  # blocks' sums are multiples of 2^-28
CANDIDATES = ("none", "mse", "mae", "max")


def _table(values: tuple[float, ...], place: Tensor) -> Tensor:
    """values[place] in FP32, place in 0..2."""
    first, second, third = values
    return torch.where(place == 0, first, torch.where(place == 1, second, third)).float()


def _split(rung: Tensor) -> tuple[Tensor, Tensor]:
    """(exponent, place of the mantissa) of rungs by number."""
    e = torch.div(rung, 3, rounding_mode="floor")
    return e, rung - 3 * e


def first_rung(amax: Tensor) -> Tensor:
    """Number of the first rung L with 6 L >= amax: 6 L has the mantissas 1.5, 1.875 and 1.125."""
    mantissa = amax.contiguous().view(torch.int32) & 0x7FFFFF
    rung = 3 * (exponent(amax) - 2) - 1
    for limit in (0x100000, 0x400000, 0x700000):
        rung = rung + (mantissa > limit)
    return rung.clamp(LOWEST, HIGHEST)


def rung_value(rung: Tensor) -> Tensor:
    """The scale of a rung, FP32."""
    e, place = _split(rung)
    return exp2_int(e) * _table(MANTISSAS, place)


def rung_inverse(rung: Tensor) -> Tensor:
    """What x is multiplied by before it is rounded, FP32."""
    e, place = _split(rung)
    return exp2_int(-e) * _table(INVERSES, place)


def halving(x: Tensor, join=torch.add) -> Tensor:  # type: ignore[no-untyped-def]
    """Elements of the last dimension (a power of two) joined: j with j + n / 2, then j with j + n / 4, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = join(x[..., :half], x[..., half:])
    return x[..., 0]


def _error(size: Tensor, ratio: Tensor, inverse: Tensor, by: str) -> Tensor:
    """Error of a candidate, FP32. size: FP16 magnitudes of a block in the last dimension, in units of a power of two;
    ratio: the candidate's scale in that unit; inverse: its inverse.
    """
    place = size * inverse.half().unsqueeze(-1)
    off = round_to(place.float().clamp_max(6.0), E2M1).half() - place
    if by == "mse":
        return halving(off * off).float() * ratio * ratio
    return halving(off.abs(), torch.add if by == "mae" else torch.maximum).float() * ratio


def _chosen(x: Tensor, rung: Tensor, floor: Tensor, by: str) -> Tensor:
    """Of the rungs one below, at and one above `rung`, none below `floor`, the one of least error. x [m, tiles, n]."""
    unit = _split(rung)[0]
    size = (x.abs() * exp2_int(-unit).unsqueeze(-1)).half()
    found, least = rung, None
    for step in (1, 0, -1):
        candidate = torch.maximum(rung + step, floor)
        e, place = _split(candidate)
        shift = exp2_int(e - unit)
        error = _error(size, shift * _table(MANTISSAS, place), _table(INVERSES, place) / shift, by)
        better = error < least if least is not None else torch.ones_like(error, dtype=torch.bool)
        found, least = torch.where(better, candidate, found), error if least is None else torch.minimum(error, least)
    return found


def row_exponent(tops: Tensor) -> Tensor:
    """e_row [m, 1] of the largest magnitudes of rows [m, 1]."""
    return _split(first_rung(tops))[0]


def below_floor(amax: Tensor, row: Tensor, exponent_span: int) -> Tensor:
    """Return which blocks, from their amax [m, tiles], have a larger rung than their own because of the span. row
    [m, 1]: scales 2^(e_row - 5).
    """
    return first_rung(amax) < 3 * (exponent(row) + TOP - exponent_span)


def quantize_ladder(x, tops, tile, candidates, exponent_span):  # type: ignore[no-untyped-def]
    """E2M1 codes of x [m, k], the rung of each tile (1, n), and 2^(e_row - 5) [m, 1]. tops [m, 1]: largest magnitudes
    of whole rows, where x is a part of them; None takes them from x. A span of 0 bounds nothing.
    """
    width = tile_shape(x.shape[0], x.shape[1], tile)[1]
    if tile[0] != 1 or width & (width - 1):
        raise ValueError(f"rungs belong to tiles of one row and a power of two of columns, not to {tuple(tile)}")
    if candidates not in CANDIDATES:
        raise ValueError(f"candidates are chosen by one of {', '.join(CANDIDATES)}, not {candidates!r}")
    x = x.float()
    amax = tile_amax(x, (1, width))
    tops = amax.amax(dim=1, keepdim=True) if tops is None else tops
    e_row = row_exponent(tops)
    floor = (3 * (e_row - exponent_span)).clamp_min(LOWEST) if exponent_span else torch.full_like(e_row, LOWEST)
    rung = torch.maximum(first_rung(amax), floor)
    if candidates != "none":
        rung = _chosen(x.unflatten(1, (-1, width)), rung, floor, candidates)
    lost = ~(tops if exponent_span else amax).isfinite()
    v = x * spread(rung_inverse(rung), x.shape, (1, width))
    codes = encode(torch.where(spread(lost.expand_as(rung), x.shape, (1, width)), torch.nan, v), E2M1)
    row = exp2_int(e_row - TOP).masked_fill(~tops.isfinite(), torch.nan)
    return codes, rung_value(rung).masked_fill(lost, torch.nan), row


def row_sums(x, codes, scale, row):  # type: ignore[no-untyped-def]
    """FP64 [m, 2]: sum y^2 and sum y q s of each row of x [m, k], in units of 2^-28 4^e_row, as whole numbers."""
    width, unit = x.shape[1] // scale.shape[1], row * 2.0**TOP
    own = (x.float() * (1.0 / unit)).unflatten(1, (-1, width))
    made = codes.float().unflatten(1, (-1, width)) * (scale * (1.0 / unit)).unsqueeze(-1)
    blocks = torch.stack((halving(own * own), halving(own * made)), dim=1)
    return (blocks * 2.0**SUM_BITS).trunc().double().sum(dim=2)


def row_factor(sums: Tensor) -> Tensor:
    """c [m, 1] in FP32 of sums [m, 2]; 1 where nothing was left to correct."""
    own, made = sums.split(1, dim=1)
    return torch.where(made == 0, 1.0, own / made).float()


def fold_ladder(codes, scale, row, factor):  # type: ignore[no-untyped-def]
    """E4M3 carriers [m, k] and a scale per row [m, 1], of what `quantize_ladder` made under a span of up to 11. factor
    [m, 1] or None: multiplied into the scale.
    """
    shift = spread(scale * (1.0 / row), codes.shape, (1, codes.shape[1] // scale.shape[1]))
    return encode(codes.float() * shift, E4M3), row * 1.0 if factor is None else row * factor


def pack_ladder(carriers):  # type: ignore[no-untyped-def]
    """Of E4M3 carriers [m, k] of blocks of 16: E2M1 codes, two a byte, and an E4M3 scale for each block, whose products
    the carriers are. NaN where a block is no such product.
    """
    blocks = to_float(carriers).unflatten(1, (-1, BLOCK))
    top = blocks.abs().amax(dim=-1)
    found, codes = torch.full_like(top, torch.nan), torch.zeros_like(blocks)
    for place in E2M1.grid[1:]:  # that of the largest magnitude: the smallest scale that serves
        scale = torch.where(top == 0, 1.0, encode(divide(top, place), E4M3).float())
        tried = encode(divide(blocks, scale.double().unsqueeze(-1)), E2M1).float()
        serves = (tried * scale.unsqueeze(-1) == blocks).all(dim=-1)
        found, codes = torch.where(serves, scale, found), torch.where(serves.unsqueeze(-1), tried, codes)
    return pack_e2m1(codes.flatten(1).to(torch.float8_e4m3fn)), found.to(torch.float8_e4m3fn)


def unpack_ladder(packed, scale):  # type: ignore[no-untyped-def]
    """The carriers that `pack_ladder` took."""
    codes = unpack_e2m1(packed)
    return encode(codes.float() * spread(scale.float(), codes.shape, (1, BLOCK)), E4M3)


def rotate_fold_ladder(  # type: ignore[no-untyped-def]
    x, scale, transposed, signs, rotation, tile, candidates, exponent_span, corrected
):
    """All steps in one: x [m, k] (with `scale`, [1, 1] or [m, 1]: E4M3 codes, decoded to BF16 first) or its transpose,
    rotated, rounded and folded. signs: seed of the rotation's signs; rotation: its block, 0 for none. corrected: rows
    have their factor.
    """
    if scale is not None:
        x = (to_float(x) * scale).to(torch.bfloat16)
    x = x.t().contiguous() if transposed else x
    x = hadamard(x, signs, rotation) if rotation else x
    codes, block, row = quantize_ladder(x, None, tile, candidates, exponent_span)
    factor = row_factor(row_sums(x, codes, block, row)) if corrected else None
    return fold_ladder(codes, block, row, factor)
