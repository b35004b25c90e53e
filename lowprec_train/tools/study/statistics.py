"""Estimates from arms x seeds: a randomised block design, fitted by least squares.

    loss of arm r on seed b = mu_r + beta_b + e,    e ~ N(0, s^2)

All arms of a seed share initial weights, batches and draws, so the effect beta_b cancels in differences. The residual
SD s is pooled over all arms: k arms on n seeds have (k - 1)(n - 1) degrees of freedom. Blocks may lack some arms: the
degrees of freedom are the number of observations minus the rank of the design, and a difference of two arms has the
standard error s sqrt(c' (X'X)^+ c).

If the spread of the residuals differs between arms (Levene's test), a difference is estimated from the pairs of its two
arms only, with (number of pairs - 1) degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Losses = Mapping[tuple[str, int], float]  # (arm, seed) -> loss in nats

LEVEL = 0.95
ALPHA = 1 - LEVEL
FEWEST = 3  # seeds of an arm in Levene's test
FREE = 1e-9  # of an observation's noise: less is a rounding error
UNEVEN = 0.01  # p of Levene's test: residuals of few seeds are correlated, so 0.05 would be too frequent by chance


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean or a difference in nats. error: standard error; None if there are too few runs. freedom: degrees of it."""

    nats: float
    error: float | None
    freedom: int

    def _quantile(self, probability: float) -> float:
        return float(stats.t.ppf(probability, self.freedom))

    def _end(self, probability: float) -> float | None:
        return None if self.error is None else self.nats + self._quantile(probability) * self.error

    @property
    def half(self) -> float | None:
        """Half-width of the two-sided 95 % interval."""
        return None if self.error is None else self._quantile(1 - ALPHA / 2) * self.error

    @property
    def low(self) -> float | None:
        return self._end(ALPHA / 2)

    @property
    def high(self) -> float | None:
        return self._end(1 - ALPHA / 2)

    @property
    def at_least(self) -> float | None:
        """Lower end of the one-sided 95 % interval."""
        return self._end(ALPHA)

    @property
    def at_most(self) -> float | None:
        """Upper end of the one-sided 95 % interval."""
        return self._end(LEVEL)

    @property
    def p(self) -> float | None:
        """p of no difference, two-sided."""
        if self.error is None:
            return None
        return float(2 * stats.t.sf(abs(self.nats) / self.error, self.freedom)) if self.error else float(not self.nats)


@dataclass(frozen=True)
class BlockFit:
    """Least-squares fit of arms and seeds. losses: finite values by (arm, seed)."""

    losses: Losses

    @cached_property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for arm, _ in self.losses))

    @cached_property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(seed for _, seed in self.losses))

    @cached_property
    def _design(self) -> Array:
        """Design matrix [observations, arms + seeds - 1]: one column an arm, and seed effects that sum to zero."""
        k, n = len(self.arms), len(self.seeds)
        rows = np.zeros((len(self.losses), k + max(0, n - 1)))
        for row, (arm, seed) in zip(rows, self.losses, strict=True):
            row[self.arms.index(arm)] = 1
            at = self.seeds.index(seed)
            row[k:] = -1 if at == n - 1 else np.arange(n - 1) == at
        return rows

    @cached_property
    def _values(self) -> Array:
        return np.array(list(self.losses.values()), float)

    @cached_property
    def _pseudo_inverse(self) -> Array:
        return np.linalg.pinv(self._design).astype(np.float64)

    @cached_property
    def _coefficients(self) -> Array:
        return self._pseudo_inverse @ self._values

    @cached_property
    def residuals(self) -> dict[tuple[str, int], float]:
        """Residual of each observation."""
        return dict(zip(self.losses, (self._values - self._design @ self._coefficients).tolist(), strict=True))

    @cached_property
    def _free(self) -> dict[tuple[str, int], float]:
        """Share of each observation's noise that its residual keeps, 1 - leverage: 0 for a seed of one arm only."""
        leverage = np.einsum("ij,ji->i", self._design, self._pseudo_inverse)
        return {key: share if (share := 1 - h) > FREE else 0.0 for key, h in zip(self.losses, leverage, strict=True)}

    @cached_property
    def freedom(self) -> int:
        """Degrees of freedom of `s`."""
        return len(self.losses) - int(np.linalg.matrix_rank(self._design)) if self.losses else 0

    @cached_property
    def s(self) -> float | None:
        """Residual SD, pooled over all arms; None without a degree of freedom."""
        return math.sqrt(sum(r * r for r in self.residuals.values()) / self.freedom) if self.freedom else None

    def mean(self, arm: str) -> float:
        """Return the mean of an arm over all seeds, also those it lacks; over its own seeds if it shares none, directly
        or through other arms, with the rest.
        """
        contrast = np.zeros(self._design.shape[1])
        contrast[self.arms.index(arm)] = 1
        if not self._estimable(contrast):
            return float(np.mean([value for (name, _), value in self.losses.items() if name == arm]))
        return float(contrast @ self._coefficients)

    def _estimable(self, contrast: Array) -> bool:
        """Return whether the runs determine this combination of coefficients."""
        return np.allclose(contrast @ self._pseudo_inverse @ self._design, contrast, atol=1e-8)

    def difference(self, arm: str, other: str) -> Estimate:
        """Estimate arm - other. Raises ValueError if they share no seed, directly or through other arms."""
        contrast = np.zeros(self._design.shape[1])
        contrast[self.arms.index(arm)] += 1
        contrast[self.arms.index(other)] -= 1
        if not self._estimable(contrast):
            raise ValueError(f"{arm} and {other} have no seed in common, so their difference is unknown")
        nats = float(contrast @ self._coefficients)
        scale = float(np.linalg.norm(contrast @ self._pseudo_inverse))
        return Estimate(nats=nats, error=None if self.s is None else self.s * scale, freedom=self.freedom)

    def spread(self, arm: str) -> float | None:
        """Return the SD of an arm's residuals, scaled so that arms that are alike expect `s`; None for one seed."""
        mine = [key for key, free in self._free.items() if key[0] == arm and free]
        free = sum(self._free[key] for key in mine)
        return math.sqrt(sum(self.residuals[key] ** 2 for key in mine) / free) if len(mine) > 1 else None

    @cached_property
    def levene(self) -> float | None:
        """p of equal spread of the residuals of all arms, each over the square root of its expected share of s^2; None
        with fewer than two arms that have three seeds.
        """
        scaled = {key: self.residuals[key] / math.sqrt(free) for key, free in self._free.items() if free}
        groups = [[r for (name, _), r in scaled.items() if name == arm] for arm in self.arms]
        groups = [group for group in groups if len(group) >= FEWEST]
        if len(groups) < 2 or self.freedom < 1 or len(self.arms) < 3:  # of two arms residuals are mirror images
            return None
        found = float(stats.levene(*groups, center="mean").pvalue)
        return found if math.isfinite(found) else None

    @property
    def uneven(self) -> bool:
        """Whether the noise differs between arms, so that intervals are made from pairs."""
        return self.levene is not None and self.levene < UNEVEN

    def compared(self, arm: str, other: str) -> Estimate:
        """Estimate arm - other with the pooled SD, or from pairs if the noise differs between arms."""
        return self.paired(arm, other) if self.uneven else self.difference(arm, other)

    def connected(self, arm: str) -> BlockFit:
        """Return the fit of this arm and of all arms that share seeds with it, directly or through other arms."""
        arms, seeds = {arm}, {seed for name, seed in self.losses if name == arm}
        while more := {name for name, seed in self.losses if seed in seeds} - arms:
            arms |= more
            seeds |= {seed for name, seed in self.losses if name in more}
        return BlockFit({key: value for key, value in self.losses.items() if key[0] in arms})

    def paired(self, arm: str, other: str) -> Estimate:
        """Estimate arm - other from the seeds that both have. Raises ValueError if there is none."""
        common = [seed for seed in self.seeds if {(arm, seed), (other, seed)} <= self.losses.keys()]
        if not common:
            raise ValueError(f"{arm} and {other} have no seed in common, so there are no pairs")
        apart = np.array([self.losses[arm, seed] - self.losses[other, seed] for seed in common])
        error = float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else None
        return Estimate(nats=float(apart.mean()), error=error, freedom=len(apart) - 1)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Adjust m p-values (Holm 1979): the smallest times m, the next times m - 1, ..., made monotone."""
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    adjusted, largest = [0.0] * len(order), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[i]))
        adjusted[i] = largest
    return adjusted


def seeds_needed(s: float, freedom: int, half_width: float) -> int:
    """Return the seeds of each arm for an interval of +- half_width: ceil(2 (t s / w)^2)."""
    return math.ceil(2 * (float(stats.t.ppf(1 - ALPHA / 2, freedom)) * s / half_width) ** 2)
