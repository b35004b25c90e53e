"""What E2M1 under block scales on {1, 1.25, 1.5} 2^e should be, from docs/numerics.md alone, as tests/oracle.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle import F32, F64, Rounded, floor_log2, signs, spread, tiles, to_grid

F16 = np.float16
RUNGS = np.array([mantissa * 2.0**e for e in range(-122, 127) for mantissa in (1, 1.25, 1.5)])[:-1]  # to 1.25 2^126
LOWEST, HIGHEST = 3, len(RUNGS) - 3  # places of the smallest scale, and of the largest first rung


@dataclass(frozen=True)
class Ladder:
    """Rounded, and what a span folds it by: 2^(e_row - 5), float32 [m, 1]. size: |x| over `unit`, float16."""

    rounded: Rounded
    row: np.ndarray
    size: np.ndarray
    unit: np.ndarray

    @property
    def carriers(self) -> Rounded:
        shift = spread(self.rounded.scale.astype(F64) / self.row, self.rounded.values.shape)
        return Rounded(self.rounded.values * shift, self.row)

    def factor(self) -> np.ndarray:
        """sum y^2 / sum y q s of each row, float32 [m, 1]; sums of blocks are multiples of 2^-16 4^e_row."""
        above = self.unit / (self.row.astype(F64) * 32)
        codes = np.abs(self.rounded.values).reshape(self.size.shape)
        own = chained(self.size, self.size) * above**2
        made = chained(self.size, codes) * above * (self.rounded.scale / (self.row.astype(F64) * 32))
        total, product = (np.trunc(np.ldexp(each, 16)).sum(axis=1, keepdims=True) for each in (own, made))
        return np.where(product == 0, 1, total / np.where(product == 0, 1, product)).astype(F32)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float16 numbers, rounded once. FP64 holds it, or it lies far from the middle of two halves."""
    exact = a.astype(F64) * b.astype(F64) + c.astype(F64)
    step = np.ldexp(1.0, np.maximum(np.frexp(exact)[1], -13) - 11)
    return (np.rint(exact / step) * step).astype(F16)


def chained(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of a b over the last dimension by fused multiply-adds, the even and the odd elements apart; float64."""
    a, b = a.astype(F16), b.astype(F16)
    total = np.zeros(a.shape[:-1] + (2,), F16)
    for i in range(0, a.shape[-1], 2):
        total = fused(a[..., i : i + 2], b[..., i : i + 2], total)
    return (total[..., 0] + total[..., 1]).astype(F64)


def first_rungs(amax: np.ndarray) -> np.ndarray:
    """Places in RUNGS of the first L with 6 L >= amax; the last one has two neighbours above."""
    return np.clip(np.searchsorted(6 * RUNGS, amax), LOWEST, HIGHEST)


def inverses(scale: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """unit / scale, float16 [m, tiles, 1]."""
    return (F32(1) / (scale / unit).astype(F32)).astype(F16)[..., None]


def candidate_error(size: np.ndarray, unit: np.ndarray, place: np.ndarray, step: int, by: str) -> np.ndarray:
    """Of the rung `step` above `place`, float64. Two above: of the rung below, on a grid twice as wide."""
    scale, grid = (RUNGS[place - 1], 2) if step == 2 else (RUNGS[place + step], 1)
    value = size * inverses(scale, unit)
    off = np.abs((to_grid(value.astype(F64) / grid, "E2M1") * grid).astype(F16) - value)
    ratio = scale / unit
    if by == "max":
        return off.max(axis=2).astype(F64) * ratio
    return chained(off, np.ones_like(off)) * ratio if by == "mae" else chained(off, off) * ratio**2


def ladder(x: np.ndarray, width: int = 16, by: str = "mse", span: int = 11, tops: np.ndarray | None = None) -> Ladder:
    """FOLD3 by default. tops: the largest magnitudes of whole rows [m, 1]; x finite."""
    x = np.asarray(x, F32)
    amax = np.abs(tiles(x, (1, width))).max(axis=(1, 3)).astype(F64)
    e_row = floor_log2(RUNGS[first_rungs(amax.max(axis=1, keepdims=True) if tops is None else tops)])
    lowest = np.searchsorted(RUNGS, 2.0 ** np.maximum(e_row - span, -121)) if span else np.full_like(e_row, LOWEST)
    own = np.maximum(first_rungs(amax), lowest)
    unit = 2.0 ** floor_log2(RUNGS[own])
    size = (np.abs(x.astype(F64)).reshape(len(x), -1, width) / unit[..., None]).astype(F16)
    if by != "none":
        errors = np.stack([candidate_error(size, unit, own, step, by) for step in (2, 1, 0, -1)])
        errors[3][own - 1 < lowest] = np.inf
        own = own + 2 - errors.argmin(axis=0)
    codes = to_grid((size * inverses(RUNGS[own], unit)).astype(F64), "E2M1").reshape(x.shape)
    scale = RUNGS[own].astype(F32)
    return Ladder(Rounded(np.copysign(codes, x) + 0.0, scale), (2.0 ** (e_row - 5)).astype(F32), size, unit)


def rotate_half(x: np.ndarray, seed: int, block: int, gain: float) -> np.ndarray:
    """Butterflies in float16, stride 1 first, of blocks whose largest magnitude was brought to [64, 128)."""
    y = np.asarray(x, F64).reshape(-1, block) * signs(seed, block)
    top = np.abs(y).max(axis=1, keepdims=True)
    shift = np.minimum(6 - floor_log2(np.where(top < 2.0**-126, 2.0**-127, top)), 110)
    y, stride = np.ldexp(y, shift).astype(F16), 1
    while stride < block:
        pairs = y.reshape(-1, block // (2 * stride), 2, stride)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        stride *= 2
    return (np.ldexp(y.astype(F64), -shift) * gain).reshape(x.shape)
