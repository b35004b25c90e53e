"""NVFP4 blocks whose largest value becomes 6 or 4, whichever gives the smaller rounding error (arXiv 2512.02010).

    t   = amax of the matrix / (6 * 256)                256, not 448: E4M3 also holds 1.5 times the largest block scale
    b6  = E4M3(A / (6 t)),  b4 = E4M3(1.5 A / (6 t))    A: amax of the block
    q_i = RN_E2M1(x / (b_i t)),  e_i = sum (q_i b_i - x / t)^2        or the sum of magnitudes, or the largest one
    b4 if e4 < e6, else b6

The grid has no value between 4 and 6: a block whose other large values are there has a smaller error one third lower.

Differences are cut to 12 bits before they are squared, so that squares are exact FP32 numbers, and added by halving,
first half plus second half: all back ends get the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.formats import E2M1, E4M3
from lowprec_train.ops.reference import TINY, divide, over, spread, tiles
from lowprec_train.ops.rounding import encode
from lowprec_train.ops.schema import tile_shape

ERRORS = ("mse", "mae", "max")
TWELVE_BITS = ~0xFFF


def quantize_four_over_six(x, amax, top, tile, candidates):  # type: ignore[no-untyped-def]
    """Return (codes, scale, block scale, outer scale) as `quantize_nvfp4_by`. amax: of the tiles; top: of the matrix,
    or of its rows or columns.

    Raises ValueError if the number of elements of a tile is not a power of two, and for unknown `candidates`.
    """
    shape, x = tile_shape(x.shape[0], x.shape[1], tile), x.float()
    count = shape[0] * shape[1]
    if count & (count - 1) or candidates not in ERRORS:
        raise ValueError(
            f"tiles need a power of two of elements and candidates one of {', '.join(ERRORS)}, "
            f"not {shape[0]}x{shape[1]} and {candidates!r}"
        )
    outer = divide(top, 6.0 * 256.0).clamp_min(TINY * 2.0**9)
    share = divide(divide(amax, 6.0), outer.double())
    six, four = (encode((share * by).clamp_min(2.0**-9), E4M3) for by in (1.0, 1.5))
    (codes, error), (lower, of_lower) = (_round_to_scale(x, block, outer, shape, candidates) for block in (six, four))
    better = of_lower < error
    block = torch.where(better, four.float(), six.float()).to(torch.float8_e4m3fn)
    scale = torch.where(amax == 0, 1.0, block.float() * outer)
    return torch.where(spread(better, x.shape, shape), lower, codes).to(torch.float8_e4m3fn), scale, block, outer


def _round_to_scale(x: Tensor, block: Tensor, outer: Tensor, tile: tuple[int, int], by: str) -> tuple[Tensor, Tensor]:
    """Return (codes FP32, error of each tile in units of the outer scale)."""
    v = over(x, block.float() * outer, tile)
    codes = encode(v, E2M1).float()
    off = (codes - v).abs() * spread(block.float(), x.shape, tile)
    off = (off.view(torch.int32) & TWELVE_BITS).view(torch.float32)
    each = tiles(off * off if by == "mse" else off, tile).permute(0, 2, 1, 3).flatten(2)
    while each.shape[-1] > 1:
        first, second = each.chunk(2, dim=-1)
        each = torch.maximum(first, second) if by == "max" else first + second
    return codes, each[..., 0]
