"""MS-EDEN (arXiv 2601.22813): NVFP4 codes to nearest, and a correction factor per 128 elements in their block scales.

    y    = rotated x                            by the random Hadamard transform, which the factor requires
    t    = h max |y| of the matrix / 255.99     h = 17/16 .93 / 6: the largest magnitude of a block is 6.072 in codes
    b_j  = E4M3(h max_16 |y| / t),  q = RN_E2M1(y / (b_j t)), at most 6
    c    = sum_128 y^2 / sum_128 y q b_j t      1 if the denominator is 0
    b_j' = SR_E4M3(c b_j)                       stochastic: the mean over the draws is c b_j
    y ~ q b_j' t

Before block scales are rounded <y, c q b t> = |y|^2 in every group; the mean of y^ over signs and scale roundings is y,
without random bits for single elements. 255.99 instead of 448 leaves room to multiply block scales by c.

Sums of a group are FP32: eight elements by halving, then the two halves of a block, times b_j^2 (exact), then pairs of
blocks. Random bits of element (row, j) belong to block j of the row, so one call of Philox serves eight blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.formats import E2M1, E4M3
from lowprec_train.ops.philox import random_bits
from lowprec_train.ops.reference import TINY, dequantize_bf16, divide, hadamard, over, spread, tile_amax
from lowprec_train.ops.rounding import STOCHASTIC, encode
from lowprec_train.ops.schema import tile_shape

BLOCK, GROUP = 16, 128
SHARE = 17 / 16 * 0.93 / 6  # h
LARGEST = 255.99  # block scale


def rotated_amax(x, signs, rotation):  # type: ignore[no-untyped-def]
    """Return the amax of x [m, k] after its rotation, FP32 [1, 1]. signs, rotation: as in `quantize_eden`."""
    y = hadamard(x, signs, rotation) if rotation else x.float()
    return y.abs().amax().reshape(1, 1)


def quantize_eden(x, top, signs, rotation, seed, origin):  # type: ignore[no-untyped-def]
    """Return (codes, scale, block scale, outer scale) of x [m, k], k a multiple of 128, as in `quantize_nvfp4` with
    blocks of 1x16.

    top [1, 1]: amax of the whole rotated matrix, of which x may be a part. signs: seed of the rotation's signs, None
    for +1; rotation: its block size, 0 for none. seed: for the stochastic rounding of scales. origin: int64 [2], global
    row and column of x[0, 0]; the column a multiple of 128. Raises ValueError for other k.
    """
    tile_shape(x.shape[0], x.shape[1], (1, GROUP))
    y = hadamard(x, signs, rotation) if rotation else x.float()
    amax = tile_amax(y, (1, BLOCK))
    outer = (top.double() * SHARE / LARGEST).float().clamp_min(TINY * 2.0**9)
    block = encode(divide((amax.double() * SHARE).float(), outer.double()).clamp_min(2.0**-9), E4M3).float()
    place = over(y, block * outer, (1, BLOCK))
    codes = encode(place, E2M1)
    blocks = None if origin is None else torch.stack((origin[0], origin[1] // BLOCK))
    bits = random_bits(seed, blocks, *block.shape)
    stored = encode(
        block * spread(_correction(place, codes, block), block.shape, (1, GROUP // BLOCK)), E4M3, STOCHASTIC, bits
    )
    return codes, torch.where(amax == 0, 1.0, stored.float() * outer), stored, outer


def round_eden(x, top, signs, rotation, seed, origin):  # type: ignore[no-untyped-def]
    """Return the dequantised codes of `quantize_eden` in BF16, without the outer scale, and the outer scale."""
    codes, _, block, outer = quantize_eden(x, top, signs, rotation, seed, origin)
    return dequantize_bf16(codes, block.float()), outer


def _correction(place: Tensor, codes: Tensor, block: Tensor) -> Tensor:
    """Return c of each group. place [m, k]: y / (b t). block [m, k / 16]: b."""
    own, made = (
        _pairwise_sums(_block_sums(place * of) * (block * block), GROUP // BLOCK) for of in (place, codes.float())
    )
    return torch.where(made == 0, 1.0, divide(own, made.double()))


def _block_sums(x: Tensor) -> Tensor:
    """Return the sums of blocks of 16: eight elements by halving (j with j + 4, ..), then the two halves."""
    x = x.unflatten(1, (-1, 8))
    for half in (4, 2, 1):
        x = x[..., :half] + x[..., half:]
    return _pairwise_sums(x[..., 0], 2)


def _pairwise_sums(x: Tensor, count: int) -> Tensor:
    """Return the sums of `count` neighbours, a power of two: of pairs, then of pairs of these, and so on."""
    while count > 1:
        x, count = x[:, 0::2] + x[:, 1::2], count // 2
    return x
