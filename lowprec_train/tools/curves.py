"""Statistics of noisy training curves: smoothing, an honest interval, spikes, and where two curves can be subtracted.

Two runs on the same batches share most of their noise, so their *difference* at matched points says far more than
either curve. Neighbouring steps are not independent, so the standard error of a mean comes from the means of batches of
steps (Schmeiser 1982), not from single steps; a training curve falls while it is measured, so a straight line through
the batches is taken out first.
"""

from dataclasses import dataclass

import numpy as np

from lowprec_train.tools.runs import Array, Series

BATCHES = 6
T_95 = (12.706, 4.303, 3.182, 2.776)  # two-sided 95 % quantiles of Student's t with 1 to BATCHES - 2 degrees of freedom
SPIKE_SIGMAS = 6.0
SPIKE_HALF_WINDOW = 10
SIGMA_FLOOR = 1e-3  # nats: a smoother curve than this has no noise to measure spikes by


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean of `points` values and its two-sided 95 % interval (None when there are too few points to tell)."""

    mean: float
    low: float | None
    high: float | None
    points: int


@dataclass(frozen=True, kw_only=True)
class Spike:
    """Consecutive logged steps far above their surroundings; `step`, `loss`, `excess` (nats) are the highest one's."""

    step: int
    loss: float
    excess: float
    sigmas: float
    length: int


def smooth(values: Array, window: int) -> Array:
    """Mean of the last `window` values, of fewer at the start. A non-finite value spoils its own windows, no others."""
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(len(values)) + 1, window)


def interval(values: Array) -> Interval:
    """Mean of `values` with a 95 % interval from means of up to 6 batches about their own straight line.

    With batch means b at centred positions x and residuals r of their least-squares line, the half-width is
    t(k - 2) * sqrt(sum(r^2) / (k - 2) / k) for k batches. None for fewer than 6 values or any that is not finite.
    """
    count = min(BATCHES, len(values) // 2)
    mean = float(np.mean(values))
    if count < 3 or not np.isfinite(values).all():
        return Interval(mean=mean, low=None, high=None, points=len(values))
    batches = np.array([np.mean(batch) for batch in np.array_split(values, count)])
    x = np.arange(count) - (count - 1) / 2
    residuals = batches - batches.mean() - x * (x @ batches) / (x @ x)
    half = T_95[count - 3] * float(np.sqrt(residuals @ residuals / (count - 2) / count))
    return Interval(mean=mean, low=mean - half, high=mean + half, points=len(values))


def running_median(values: Array) -> Array:
    """Median of up to 10 values either side. At the start the window stays symmetric: a steep fall is not a spike."""
    n = len(values)
    half = np.minimum(np.arange(n), SPIKE_HALF_WINDOW)
    return np.array([np.median(values[i - h : min(i + h, n - 1) + 1]) for i, h in enumerate(half)])


def spikes(loss: Series) -> list[Spike]:
    """Where the finite losses exceed their running median by more than 6 robust sigmas (1.4826 * median |residual|)."""
    finite = np.isfinite(loss.values)
    steps, values = loss.steps[finite], loss.values[finite]
    if not len(values):
        return []
    excess = values - running_median(values)
    sigma = max(1.4826 * float(np.median(np.abs(excess))), SIGMA_FLOOR)
    above = np.flatnonzero(excess > SPIKE_SIGMAS * sigma)
    events = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else []
    found = []
    for event in events:
        top = event[np.argmax(excess[event])]
        found.append(
            Spike(
                step=int(steps[top]),
                loss=float(values[top]),
                excess=float(excess[top]),
                sigmas=float(excess[top] / sigma),
                length=len(event),
            )
        )
    return found


def at_common_steps(run: Series, baseline: Series) -> tuple[Array, Array, Array]:
    """(steps, run's values, baseline's values) where both have one."""
    steps, i, j = np.intersect1d(run.steps, baseline.steps, assume_unique=True, return_indices=True)
    return steps, run.values[i], baseline.values[j]


def at_common_tokens(run: tuple[Array, Array], baseline: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """(tokens, run's values, baseline's values) at the baseline's token counts within both ranges.

    Each input is (tokens, values). The run is interpolated linearly between its own points, and taken as it is where
    it has one.
    """
    x, y = run
    tokens, reference = baseline
    inside = (tokens >= x[0]) & (tokens <= x[-1])
    tokens, reference = tokens[inside], reference[inside]
    nearest = np.searchsorted(x, tokens)
    return tokens, np.where(x[nearest] == tokens, y[nearest], np.interp(tokens, x, y)), reference


def first_at_most(values: Array, target: float) -> int | None:
    """Index of the first value that is at most `target`."""
    hits = np.flatnonzero(values <= target)
    return int(hits[0]) if len(hits) else None
