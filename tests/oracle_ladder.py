"""What E2M1 under block scales on {1, 1.25, 1.5} 2^e should be, from docs/numerics.md alone, as tests/oracle.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle import F32, F64, Rounded, by_inverse, floor_log2, spread, tiles, to_grid

RUNGS = np.array([mantissa * 2.0**e for e in range(-121, 127) for mantissa in (1, 1.25, 1.5)])[:-2]  # up to 2^126


@dataclass(frozen=True)
class Ladder:
    """Rounded, and what a span folds it by: 2^(e_row - 5), float32 [m, 1]."""

    rounded: Rounded
    row: np.ndarray

    @property
    def carriers(self) -> Rounded:
        shift = spread(self.rounded.scale.astype(F64) / self.row, self.rounded.values.shape)
        return Rounded(self.rounded.values * shift, self.row)

    def factor(self, x: np.ndarray) -> np.ndarray:
        """sum y^2 / sum y q s of each row, float32 [m, 1]; blocks' sums in float32 by halving, cut off at 2^-28."""
        unit = self.row.astype(F64) * 32
        own, made = ((each.astype(F64) / unit).astype(F32) for each in (x, self.rounded.exact))
        width = x.shape[1] // self.rounded.scale.shape[1]
        of_blocks = [halved((own * each).reshape(len(x), -1, width)).astype(F64) for each in (own, made)]
        total, product = (np.trunc(np.ldexp(each, 28)).sum(axis=1, keepdims=True) for each in of_blocks)
        return np.where(product == 0, 1, total / np.where(product == 0, 1, product)).astype(F32)


def halved(x: np.ndarray) -> np.ndarray:
    """The last dimension added up in the dtype of x: the second half onto the first, until one is left."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def first_rungs(amax: np.ndarray) -> np.ndarray:
    """Places in RUNGS of the first L with 6 L >= amax; the last one but one has a neighbour above."""
    return np.minimum(np.searchsorted(6 * RUNGS, amax), len(RUNGS) - 2)


def candidate_error(blocks: np.ndarray, unit: np.ndarray, scale: np.ndarray, by: str) -> np.ndarray:
    """Of blocks [m, tiles, n] under scales [m, tiles], in half precision, over powers of two `unit`."""
    ratio = scale / unit
    size = (np.abs(blocks) / unit[..., None]).astype(np.float16)
    place = size * (F32(1) / ratio.astype(F32)).astype(np.float16)[..., None]
    off = np.abs(to_grid(place.astype(F64), "E2M1").astype(np.float16) - place)
    if by == "max":
        return off.max(axis=2).astype(F64) * ratio
    return halved(off).astype(F64) * ratio if by == "mae" else halved(off * off).astype(F64) * ratio**2


def ladder(x: np.ndarray, width: int = 16, by: str = "mse", span: int = 11, tops: np.ndarray | None = None) -> Ladder:
    """FOLD3 by default. tops: the largest magnitudes of whole rows [m, 1]; x finite."""
    x = np.asarray(x, F32)
    amax = np.abs(tiles(x, (1, width))).max(axis=(1, 3)).astype(F64)
    e_row = floor_log2(RUNGS[first_rungs(amax.max(axis=1, keepdims=True) if tops is None else tops)])
    lowest = np.searchsorted(RUNGS, 2.0 ** np.maximum(e_row - span, -121)) if span else np.zeros_like(e_row)
    own = np.maximum(first_rungs(amax), lowest)
    if by != "none":
        tried = np.stack([own + 1, own, np.maximum(own - 1, lowest)])
        unit, blocks = 2.0 ** floor_log2(RUNGS[own]), x.astype(F64).reshape(len(x), -1, width)
        errors = np.stack([candidate_error(blocks, unit, RUNGS[each], by) for each in tried])
        own = np.take_along_axis(tried, errors.argmin(axis=0)[None], axis=0)[0]
    scale = RUNGS[own].astype(F32)
    return Ladder(Rounded(to_grid(by_inverse(x, scale), "E2M1"), scale), (2.0 ** (e_row - 5)).astype(F32))
