"""What NVFP4 blocks with EDEN's factor in their scales should be (arXiv 2601.22813), from docs/numerics.md alone, as
tests/oracle.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle import F32, F64, Rounded, random_bits, scaled, spread, tiles, to_grid

SHARE = 17 / 16 * 0.93 / 6


@dataclass(frozen=True)
class Eden:
    """Rounded; block scales before the factor, as E4M3 values; factors of groups of 128; the scale of the matrix."""

    rounded: Rounded
    block: np.ndarray
    factor: np.ndarray
    stored: np.ndarray
    tensor: np.ndarray


def summed(products: np.ndarray, count: int) -> np.ndarray:
    """[m, n] -> [m, n / count] in float32, neighbours first."""
    while count > 1:
        products, count = products[:, ::2] + products[:, 1::2], count // 2
    return products


def of_blocks(products: np.ndarray) -> np.ndarray:
    """Sums of sixteen: j with j + 4 of eight, then j + 2, then j + 1; then the two eights."""
    eights = products.reshape(len(products), -1, 8)
    for half in (4, 2, 1):
        eights = eights[..., :half] + eights[..., half : 2 * half]
    return summed(eights[..., 0], 2)


def eden(x: np.ndarray, seed: int, origin: tuple[int, int] = (0, 0), top: float | None = None) -> Eden:
    """x [m, k] finite, rotated already. origin: of x in the whole. top: the largest magnitude of the whole."""
    x = np.asarray(x, F32)
    amax = np.abs(tiles(x, (1, 16))).max(axis=(1, 3)).astype(F64)
    most = np.full((1, 1), amax.max() if top is None else top)
    tensor = np.maximum((most * SHARE / 255.99).astype(F32), F32(2.0**-117)).astype(F64)
    share = ((amax * SHARE).astype(F32) / tensor).astype(F32)
    block = to_grid(np.maximum(share, F32(2.0**-9)), "E4M3")
    place = scaled(x, (block * tensor).astype(F32))
    codes = to_grid(place, "E2M1")
    square = (block * block).astype(F32)
    own, made = (summed(of_blocks(place * each) * square, 8) for each in (place, codes.astype(F32)))
    factor = np.where(made == 0, F32(1), own / np.where(made == 0, F32(1), made)).astype(F32)
    bits = random_bits(seed, *block.shape, (origin[0], origin[1] // 16))
    stored = to_grid((block.astype(F32) * spread(factor, block.shape)).astype(F32), "E4M3", bits)
    scale = np.where(amax == 0, F32(1), (stored * tensor).astype(F32)).astype(F32)
    return Eden(Rounded(codes, scale), block, factor, stored, tensor.astype(F32))
