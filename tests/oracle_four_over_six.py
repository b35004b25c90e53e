"""What NVFP4 blocks that reach 6 or 4 should be (arXiv 2512.02010), from docs/numerics.md alone, as tests/oracle.py."""

from __future__ import annotations

import numpy as np

from tests.oracle import F32, F64, Rounded, scaled, spread, tiles, to_grid


def four_over_six(
    x: np.ndarray, tile: tuple[int, int] = (1, 16), by: str = "mse", outer: tuple[int, int] = (-1, -1)
) -> tuple[Rounded, np.ndarray, np.ndarray]:
    """(rounded, block scales as E4M3 values, which tiles took the 4); x finite."""
    x = np.asarray(x, F32)
    amax = np.abs(tiles(x, tile)).max(axis=(1, 3)).astype(F64)
    most = amax.max(axis=tuple(axis for axis in (0, 1) if outer[axis] == -1), keepdims=True)
    tensor = np.maximum((most / (6 * 256)).astype(F32), F32(2.0**-117)).astype(F64)
    share = ((amax / 6).astype(F32) / tensor).astype(F32)
    tried = []
    for reach in (F32(1), F32(1.5)):
        block = to_grid(np.maximum(share * reach, F32(2.0**-9)), "E4M3")
        scale = (block * tensor).astype(F32)
        place = scaled(x, scale)
        codes = to_grid(place, "E2M1")
        off = np.abs(codes.astype(F32) - place) * spread(block.astype(F32), x.shape)
        off = (off.view(np.uint32) & 0xFFFFF000).view(F32)
        each = tiles(off, tile).transpose(0, 2, 1, 3).reshape(*amax.shape, -1)
        tried.append((codes, block, scale, _total(each, by)))
    four = tried[1][3] < tried[0][3]
    codes = np.where(spread(four, x.shape), tried[1][0], tried[0][0])
    block, scale = (np.where(four, tried[1][i], tried[0][i]) for i in (1, 2))
    return Rounded(codes, np.where(amax == 0, F32(1), scale).astype(F32)), block, four


def _total(each: np.ndarray, by: str) -> np.ndarray:
    if by == "max":
        return each.max(axis=-1)
    each = each * each if by == "mse" else each
    while each.shape[-1] > 1:
        half = each.shape[-1] // 2
        each = each[..., :half] + each[..., half:]
    return each[..., 0]
