"""Gaps in tokens: how many fewer tokens the baseline needs for an arm's loss, and scaling-law efficiencies.

    L_base(D') = L_arm(D)        extra tokens = D / D' - 1

L_base is interpolated in log D between baseline runs of different lengths, each with its own learning-rate decay;
points along one run with a decaying rate are not such a curve.

With enough sizes and lengths, L = (A / N^a + B / D^b)^g + E is fitted to the baseline (Huber loss on log residuals).
With this law fixed, eff_N and eff_D in L(N eff_N, D eff_D) are fitted to the points of each arm (arXiv 2505.14669).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from lowprec_train.tools.study.statistics import Estimate

HUBER = 1e-4  # of log residuals
FEWEST_POINTS, FEWEST_SIZES, FEWEST_OF_ARM = 8, 3, 4
BEYOND = 2.0  # the curve is extrapolated up to this factor beyond its ends

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Extra tokens as a share of the tokens; low, high: from the ends of the gap's 95 % interval."""

    share: float
    low: float | None
    high: float | None


def extra_tokens(gap: Estimate, tokens: int, curve: Mapping[int, float]) -> Extra | None:
    """Convert a gap to extra tokens; None if the baseline has one length only or the loss is outside of its curve."""
    if len(curve) < 2 or tokens not in curve:
        return None
    base = curve[tokens]
    share = _share(base + gap.nats, tokens, curve)
    ends = [None if end is None else _share(base + end, tokens, curve) for end in (gap.low, gap.high)]
    return None if share is None else Extra(share=share, low=ends[0], high=ends[1])


def _share(loss: float, tokens: int, curve: Mapping[int, float]) -> float | None:
    reached = tokens_for(loss, curve)
    return None if reached is None else tokens / reached - 1


def tokens_for(loss: float, curve: Mapping[int, float]) -> float | None:
    """Return the length at which the curve has this loss: linear in log D, extrapolated by at most a factor of two.

    None if the length is further away, or if the curve is not decreasing.
    """
    lengths = sorted(curve)
    logs, values = np.log(lengths), np.array([curve[n] for n in lengths])
    if np.any(np.diff(values) >= 0):
        return None
    part = int(np.clip(np.searchsorted(-values, -loss), 1, len(values) - 1))
    slope = (values[part] - values[part - 1]) / (logs[part] - logs[part - 1])
    at = logs[part - 1] + (loss - values[part - 1]) / slope
    inside = logs[0] - math.log(BEYOND) <= at <= logs[-1] + math.log(BEYOND)
    return math.exp(at) if inside else None


@dataclass(frozen=True, kw_only=True)
class Law:
    """L(N, D) = (A / N^a + B / D^b)^g + E. error: RMS of the log residuals."""

    A: float
    a: float
    B: float
    b: float
    g: float
    E: float
    error: float

    def __call__(self, n: Array, d: Array) -> Array:
        return (self.A / n**self.a + self.B / d**self.b) ** self.g + self.E


def fit_law(points: Sequence[tuple[float, float, float]]) -> Law | None:
    """Fit the law to points (parameters, tokens, loss); None with fewer than 8 points or 3 sizes."""
    if len(points) < FEWEST_POINTS or len({n for n, _, _ in points}) < FEWEST_SIZES:
        return None
    n, d, loss = np.array(points, float).T

    def unpacked(x: Array) -> dict[str, float]:
        return {"A": math.exp(x[0]), "a": x[1], "B": math.exp(x[2]), "b": x[3], "g": x[4], "E": x[5]}

    def residuals(x: Array) -> Array:
        return np.log(Law(**unpacked(x), error=0.0)(n, d)) - np.log(loss)

    low, high = [-5, 0.05, -5, 0.05, 0.05, 0.0], [40, 2, 40, 2, 2, 0.99 * float(loss.min())]
    starts = [
        (a * math.log(1e7), a, a * math.log(1e8), a, g, e)
        for a in (0.3, 0.5, 0.8)
        for g in (0.3, 0.7, 1.0)
        for e in (0.5, 0.8 * float(loss.min()))
    ]
    best = _least(residuals, starts, low, high)
    return Law(**unpacked(best), error=float(np.sqrt(np.mean(residuals(best) ** 2))))


def efficiency(law: Law, points: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Fit (eff_N, eff_D) to an arm's points under the baseline's law; None with fewer than 4 points."""
    if len(points) < FEWEST_OF_ARM:
        return None
    n, d, loss = np.array(points, float).T

    def residuals(x: Array) -> Array:
        return np.log(law(n * np.exp(x[0]), d * np.exp(x[1]))) - np.log(loss)

    best = _least(residuals, [(0.0, 0.0), (-0.5, 0.0), (0.0, -0.5)], [-4.0, -4.0], [4.0, 4.0])
    return math.exp(best[0]), math.exp(best[1])


def _least(
    residuals: Callable[[Array], Array],
    starts: Sequence[Sequence[float]],
    low: Sequence[float],
    high: Sequence[float],
) -> Array:
    """Return the solution with the lowest cost over several starting points."""
    options = {"loss": "huber", "f_scale": HUBER, "bounds": (low, high), "x_scale": "jac", "max_nfev": 4000}
    found = [optimize.least_squares(residuals, np.clip(start, low, high), **options) for start in starts]
    return min(found, key=lambda each: each.cost).x
