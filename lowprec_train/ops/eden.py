"""MS-EDEN (arXiv 2601.22813): NVFP4 blocks to nearest, and a factor for each 128 elements in their block scales.

    y    = rotated x                            by the random Hadamard transform that the factor needs
    t    = h max |y| of the matrix / 255.99     h = 17/16 .93 / 6: the largest magnitude of a block is 6.072 in codes
    b_j  = E4M3(h max_16 |y| / t),  q = RN_E2M1(y / (b_j t)), at most 6
    c    = sum_128 y^2 / sum_128 y q b_j t      1 where nothing is left to correct
    b_j' = SR_E4M3(c b_j)                       stochastic: the mean over the draws is c b_j
    y ~ q b_j' t

Before scales are rounded <y, c q b t> = |y|^2 in every group; over signs and draws the mean of y^ is y, without a draw
for an element. 255.99 instead of 448 leaves scales the room that c takes.

A group's sums are FP32: of eight elements by halving, of two such halves of a block, times b_j^2 (exact), of blocks in
pairs. Element (row, j) of the draws belongs to block j of a row, so eight blocks take one call of Philox.
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
    """Largest magnitude of x [m, k] after its rotation, FP32 [1, 1]. signs, rotation: as in `quantize_eden`."""
    y = hadamard(x, signs, rotation) if rotation else x.float()
    return y.abs().amax().reshape(1, 1)


def quantize_eden(x, top, signs, rotation, seed, origin):  # type: ignore[no-untyped-def]
    """(codes, scale, block, outer scale) of x [m, k], k a multiple of 128, as `quantize_nvfp4` of blocks of 1x16.

    top [1, 1]: largest rotated magnitude of the matrix that x is a part of. signs: seed of the rotation's signs, None
    for +1; rotation: its block, 0 for none. seed: of the scales' rounding. origin: int64 [2], global row and column of
    x[0, 0]; the column a multiple of 128. Raises ValueError for other k.
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
        block * spread(_factor(place, codes, block), block.shape, (1, GROUP // BLOCK)), E4M3, STOCHASTIC, bits
    )
    return codes, torch.where(amax == 0, 1.0, stored.float() * outer), stored, outer


def round_eden(x, top, signs, rotation, seed, origin):  # type: ignore[no-untyped-def]
    """What codes of `quantize_eden` stand for, as `round_nvfp4`."""
    codes, _, block, outer = quantize_eden(x, top, signs, rotation, seed, origin)
    return dequantize_bf16(codes, block.float()), outer


def _factor(place: Tensor, codes: Tensor, block: Tensor) -> Tensor:
    """c of each group. place [m, k]: y / (b t). block [m, k / 16]: b."""
    own, made = (_pairs(_eights(place * of) * (block * block), GROUP // BLOCK) for of in (place, codes.float()))
    return torch.where(made == 0, 1.0, divide(own, made.double()))


def _eights(x: Tensor) -> Tensor:
    """Sums of blocks of 16: eight elements by halving (j with j + 4, ..), then the two halves."""
    x = x.unflatten(1, (-1, 8))
    for half in (4, 2, 1):
        x = x[..., :half] + x[..., half:]
    return _pairs(x[..., 0], 2)


def _pairs(x: Tensor, count: int) -> Tensor:
    """Sums of `count` neighbours, a power of two: of pairs, then of pairs of these, and so on."""
    while count > 1:
        x, count = x[:, 0::2] + x[:, 1::2], count // 2
    return x
