"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state.

A schedule maps the 0-based index of an update to its learning rate. With W warm-up steps and N steps in all:

    warm-up          lr(s) = peak * (s + 1) / W                          s < W       lr(W - 1) = peak
    decay            lr(s) = peak * (f + (1 - f) * shape(p))             s >= W      lr(N - 1) = f * peak

where f is the final fraction and p in (0, 1] the completed part of the decay after this update. After the last step the
final value is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Learning rate of the update with 0-based index `step`."""

    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Parts of all schedules: the peak, the length of the run, a linear warm-up.

    Args:
        peak: highest learning rate, > 0.
        steps: updates in the whole run, >= 1.
        warmup_steps: length of the warm-up in updates; or
        warmup_fraction: the same as a fraction of `steps` in [0, 1). Neither: no warm-up.
        final_fraction: last learning rate as a fraction of the peak, in [0, 1].

    Raises:
        ValueError: a value out of range, both forms of the warm-up, or a warm-up that is not shorter than the run.
    """

    peak: float
    steps: int
    warmup_steps: int | None = None
    warmup_fraction: float | None = None
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if type(self) is Warmup:
            raise ValueError("Warmup has no decay: choose WarmupLinear, WarmupCosine or WarmupStableDecay")
        if not 0 < self.peak < math.inf:
            raise ValueError(f"peak learning rate (optim.lr) must be a positive number, got {self.peak}")
        if self.steps < 1:
            raise ValueError(f"a schedule needs at least 1 step, got steps={self.steps}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction must lie in [0, 1], got {self.final_fraction}")
        _check_one("warmup", self.warmup_steps, self.warmup_fraction)
        if self.warmup_fraction is not None and not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"warmup_fraction must lie in [0, 1), got {self.warmup_fraction}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"the warm-up must be shorter than the run: {self.warmup} of {self.steps} steps")

    @property
    def warmup(self) -> int:
        """Length of the warm-up in updates."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return round((self.warmup_fraction or 0.0) * self.steps)

    def __call__(self, step: int) -> float:
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * self._shape(step))

    def _shape(self, step: int) -> float:
        """Return the factor: 1 at the peak, 0 at the end of the decay."""
        raise NotImplementedError

    def _progress(self, step: int, start: int) -> float:
        """Return the completed part, after update `step`, of a decay from update `start` to the end of the run."""
        return min(1.0, max(0, step - start + 1) / (self.steps - start))


@dataclass(frozen=True, kw_only=True)
class WarmupLinear(Warmup):
    """Warm-up, then a straight line to the final fraction."""

    def _shape(self, step: int) -> float:
        return 1 - self._progress(step, self.warmup)


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(Warmup):
    """Warm-up, then half a cosine to the final fraction (arXiv 1608.03983)."""

    def _shape(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * self._progress(step, self.warmup)))


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Warmup):
    """Warm-up, a plateau at the peak, and a decay over the tail of the run (WSD, arXiv 2404.06395).

    Args:
        decay_steps: length of the tail in updates; or
        decay_fraction: the same as a fraction of `steps` in (0, 1]. Neither: 0.2.
        shape: "linear", or "sqrt" for 1 - sqrt(p) (arXiv 2405.18392).
    """

    decay_steps: int | None = None
    decay_fraction: float | None = None
    shape: str = "linear"
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in ("linear", "sqrt"):
            raise ValueError(f"shape must be linear or sqrt, got {self.shape!r}")
        _check_one("decay", self.decay_steps, self.decay_fraction)
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must lie in (0, 1], got {self.decay_fraction}")
        if not 1 <= self.decay <= self.steps - self.warmup:
            raise ValueError(
                f"the decay must have at least 1 step and fit behind the warm-up: "
                f"decay {self.decay} + warm-up {self.warmup} of {self.steps} steps"
            )

    @property
    def decay(self) -> int:
        """Length of the decay in updates."""
        if self.decay_steps is not None:
            return self.decay_steps
        return round((0.2 if self.decay_fraction is None else self.decay_fraction) * self.steps)

    def _shape(self, step: int) -> float:
        progress = self._progress(step, self.steps - self.decay)
        return 1 - (math.sqrt(progress) if self.shape == "sqrt" else progress)


def _check_one(part: str, steps: int | None, fraction: float | None) -> None:
    if steps is not None and fraction is not None:
        raise ValueError(f"give {part}_steps or {part}_fraction, not both: got {steps} and {fraction}")


def before_decay(schedule: Schedule) -> tuple[int, ...]:
    """Return (updates before the decay,) of a WSD schedule, from where a longer run can continue; () for others."""
    if not isinstance(schedule, WarmupStableDecay) or schedule.steps == schedule.decay:
        return ()
    return (schedule.steps - schedule.decay,)
