"""COAT's dynamic range expansion (arXiv 2410.19313, section 4), in FP64 with the true logarithm and power.

A group's magnitudes are raised to a power k that stretches their range to the format's before they are rounded:

    center = sqrt(max) sqrt(min)            max, min over the group's numbers that are not zero
    k      = floor(16 log2(B) / log2(max / min)) / 16                    B = M^2 / 2, 100352 for E4M3
    scale  = (max / center)^k / M
    code   = round(sign(x) (|x| / center)^k / scale)
    x      ~ sign(code) |code scale|^(1 / k) center

A group of zeros has k = 1, center = 1, scale = 1 / M; one whose numbers are equal has k = K_MAX, which bounds every k,
as 1/16 does. FP32 subnormals count as zeros. Groups lie along the last dimension and restart at each of its segments,
eight in a whole row. Nothing here may import the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle import F64, largest, to_grid

STEP = 1 / 16  # of k
K_MAX = 64.0
SEGMENTS = 8  # of a whole row
SMALLEST = 2.0**-126


@dataclass(frozen=True)
class Groups:
    """How a row of k columns is cut."""

    k: int
    group: int = 128
    segments: int = SEGMENTS

    @property
    def first(self) -> np.ndarray:
        """First column of each group: full groups, then what is left of a segment."""
        assert self.k % self.segments == 0
        part = self.k // self.segments
        return np.array([start + offset for start in range(0, self.k, part) for offset in range(0, part, self.group)])

    def spread(self, values: np.ndarray) -> np.ndarray:
        """A number per group -> a number per element."""
        return np.repeat(values, np.diff(np.append(self.first, self.k)), axis=1)


def normal(x: np.ndarray) -> np.ndarray:
    """FP64, without what FP32 holds as a subnormal."""
    x = np.asarray(x, F64)
    return np.where(np.abs(x) < SMALLEST, np.copysign(0.0, x), x)


def extent(x: np.ndarray, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """Largest and smallest magnitude that is not zero, [m, groups] each; 1 and 1 of zeros."""
    magnitude = np.abs(normal(x))
    first = groups.first
    top = np.maximum.reduceat(magnitude, first, axis=1)
    low = np.minimum.reduceat(np.where(magnitude == 0, np.inf, magnitude), first, axis=1)
    return np.where(top == 0, 1, top), np.where(top == 0, 1, low)


@dataclass(frozen=True)
class Expanded:
    """FP64 [m, groups]; steps: 16 k before floor(). ratio [m, k] is what is rounded: M (|x| / max)^k with x's sign."""

    ratio: np.ndarray
    scale: np.ndarray
    exponent: np.ndarray
    center: np.ndarray
    steps: np.ndarray


def expand(x: np.ndarray, format: str, groups: Groups, exponent: np.ndarray | None = None) -> Expanded:
    """x [m, k], finite. exponent [m, groups]: used instead of the one computed here."""
    x = normal(x)
    top, low = extent(x, groups)
    largest_code = largest(format)
    distance = np.log2(top) - np.log2(low)
    with np.errstate(divide="ignore"):
        steps = np.clip(np.log2(largest_code**2 / 2) / distance, STEP, K_MAX) / STEP
    empty = np.add.reduceat(np.abs(x), groups.first, axis=1) == 0
    steps = np.where(empty, 1 / STEP, steps)
    k = np.floor(steps) * STEP if exponent is None else np.asarray(exponent, F64)
    center = np.sqrt(top) * np.sqrt(low)
    place = np.abs(x) / groups.spread(top)
    ratio = np.copysign(largest_code * place ** groups.spread(k), x)
    return Expanded(ratio, (top / center) ** k / largest_code, k, center, steps)


def contract(
    codes: np.ndarray, scale: np.ndarray, exponent: np.ndarray, center: np.ndarray, groups: Groups
) -> np.ndarray:
    """The inverse: values of codes [m, k] and parts [m, groups] -> x [m, k], FP64."""
    s, k, c = (groups.spread(np.asarray(part, F64)) for part in (scale, exponent, center))
    return np.sign(codes) * (np.abs(codes) * s) ** (1 / k) * c


def reachable(ratio: np.ndarray, format: str, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest code's magnitude that a relative error of `distance` before rounding can lead to: equal
    unless the value lies that near to a rounding boundary."""
    magnitude = np.abs(ratio)
    return to_grid(magnitude * (1 - distance), format), to_grid(magnitude * (1 + distance), format)
