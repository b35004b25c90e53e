"""Statistics of noisy training curves: smoothing, confidence intervals, spikes, and points that two curves share.

Two runs on the same batches share most of their noise, so their *difference* at matched points is far more precise than
either curve. Neighbouring steps are not independent, so the standard error of a mean comes from the means of batches of
steps (Schmeiser 1982), not from single steps. A training curve falls during the measurement, so the straight line
through the batch means is subtracted first.
"""

import math
from dataclasses import dataclass

import numpy as np

from lowprec_train.tools.compare.runs import Array, Series

BATCHES = 6
T_95 = (12.706, 4.303, 3.182, 2.776)  # two-sided 95 % quantiles of Student's t with 1 to BATCHES - 2 degrees of freedom
SPIKE_HALF_WINDOW = 25  # steps of the running median
NOISE_HALF_WINDOW = 50  # steps in which the noise is measured
SIGMA_FLOOR = 1e-3  # nats: minimum noise level of a curve
TAIL_RANGE = (1.645, 3.0)  # sigmas that 5 % of the steps exceed: at least as for Gaussian noise
SPIKE_EDGE, SPIKE_LASTING, SPIKE_SINGLE = 2.0, 4.0, 9.0  # in reaches: edge of a spike, top of a long and of a short one
SPIKE_STEPS = 3  # minimum length of a long spike
SPIKE_NATS = 0.05


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean of `points` values and its two-sided 95 % interval (None if there are too few points)."""

    mean: float
    low: float | None
    high: float | None
    points: int


@dataclass(frozen=True, kw_only=True)
class Spike:
    """Consecutive logged steps far above their neighbours. step, loss, excess (nats): of the highest step.

    reaches: `excess` in units of the excess that 5 % of the steps have by chance (`reach`).
    """

    step: int
    loss: float
    excess: float
    reaches: float
    length: int


def smooth(values: Array, window: int) -> Array:
    """Return the mean of the last `window` values, of fewer at the start. A non-finite value affects only windows that
    contain it.
    """
    sums = np.convolve(values, np.ones(window))[: len(values)]
    return sums / np.minimum(np.arange(len(values)) + 1, window)


def drawn(values: Array, window: int) -> Array:
    """Return a curve's running mean for figures, at all its steps.

    Each point is the mean of a centred window with the largest odd number of steps up to `window`. At the start the
    window shrinks symmetrically, so the mean follows a steep fall. The last half window is the least-squares line
    through the last window, which neither ends early nor lags (as in a Savitzky-Golay filter of degree 1). A non-finite
    value affects only windows that contain it.
    """
    n = len(values)
    size = min(window, n) - (min(window, n) + 1) % 2
    half = size // 2
    if half < 1:
        return values.astype(float)
    start = [np.mean(values[: 2 * i + 1]) for i in range(half)]
    inside = np.convolve(values, np.ones(size), mode="valid") / size
    x = np.arange(-half, half + 1)
    slope = x @ (values[-size:] - values[-half - 1]) / (x @ x) if np.isfinite(values[-size:]).all() else np.nan
    return np.concatenate([start, inside, inside[-1] + slope * x[half + 1 :]])


def interval(values: Array) -> Interval:
    """Return the mean of `values` with a 95 % interval from the means of up to 6 batches around their straight line.

    With batch means b at centred positions x and residuals r of their least-squares line, the half-width is
    t(k - 2) * sqrt(sum(r^2) / (k - 2) / k) for k batches. The interval is None for fewer than 6 values or non-finite
    ones.
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
    """Return the median of up to 25 values on either side. At the start the window is symmetric, so that a steep fall
    is not a spike.
    """
    n = len(values)
    half = np.minimum(np.arange(n), SPIKE_HALF_WINDOW)
    return np.array([np.median(values[i - h : min(i + h, n - 1) + 1]) for i, h in enumerate(half)])


def reach(values: Array, excess: Array) -> Array:
    """Return, for each step, the excess in nats that 5 % of the steps have by chance.

    It is sigma times the 95 % quantile of excess / sigma: 1.645 for Gaussian noise, more for a heavy tail, at most 3,
    so that spikes cannot raise it further. sigma is 1.4826 times the larger of two medians within 50 steps: of |excess|
    (at least that of the whole run), and of a step's distance from the mean of its neighbours over sqrt(1.5). The
    second is needed in a steep fall, where the running median passes through the steps and leaves no excess.
    """
    apart = np.pad(np.abs(values[1:-1] - (values[:-2] + values[2:]) / 2), 1, mode="edge") if len(values) > 2 else 0.0
    sigma = np.maximum(near_median(np.abs(excess)), near_median(apart + 0 * excess) / math.sqrt(1.5))
    sigma = np.maximum(1.4826 * np.maximum(sigma, np.median(np.abs(excess))), SIGMA_FLOOR)
    return sigma * float(np.clip(np.quantile(excess / sigma, 0.95), *TAIL_RANGE))


def near_median(values: Array) -> Array:
    """Return the median of the values within 50 steps, computed at every tenth step and interpolated."""
    h, n = NOISE_HALF_WINDOW, len(values)
    at = np.unique(np.append(np.arange(0, n, 10), n - 1))
    return np.interp(np.arange(n), at, [np.median(values[max(0, i - h) : i + h + 1]) for i in at])


def spikes(loss: Series) -> list[Spike]:
    """Return the spikes of the finite losses above their running median.

    Consecutive steps above 2 reaches are one event. It is a spike if its top is at least 0.05 nat above the median and
    above 9 reaches, or above 4 if the event has at least 3 steps: noise seldom lasts.
    """
    finite = np.isfinite(loss.values)
    steps, values = loss.steps[finite], loss.values[finite]
    if not len(values):
        return []
    excess = values - running_median(values)
    height = excess / reach(values, excess)
    above = np.flatnonzero(height > SPIKE_EDGE)
    events = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else []
    found = []
    for event in events:
        top = event[np.argmax(excess[event])]
        least = SPIKE_SINGLE if len(event) < SPIKE_STEPS else SPIKE_LASTING
        if height[top] > least and excess[top] >= SPIKE_NATS:
            size = {"excess": float(excess[top]), "reaches": float(height[top])}
            found.append(Spike(step=int(steps[top]), loss=float(values[top]), length=len(event), **size))
    return found


def at_common_steps(run: Series, baseline: Series) -> tuple[Array, Array, Array]:
    """Return (steps, run's values, baseline's values) at the steps that both have."""
    steps, i, j = np.intersect1d(run.steps, baseline.steps, assume_unique=True, return_indices=True)
    return steps, run.values[i], baseline.values[j]


def at_common_tokens(run: tuple[Array, Array], baseline: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Return (tokens, run's values, baseline's values) at the baseline's token counts within both ranges.

    Each input is (tokens, values). The run is interpolated linearly between its points; where it has a point, that
    value is used.
    """
    x, y = run
    tokens, reference = baseline
    inside = (tokens >= x[0]) & (tokens <= x[-1])
    tokens, reference = tokens[inside], reference[inside]
    nearest = np.searchsorted(x, tokens)
    return tokens, np.where(x[nearest] == tokens, y[nearest], np.interp(tokens, x, y)), reference


def evenly(count: int, most: int) -> Array:
    """Return at most `most` indices below `count`, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))


def first_at_most(values: Array, target: float) -> int | None:
    """Return the index of the first value that is at most `target`; None without one."""
    hits = np.flatnonzero(values <= target)
    return int(hits[0]) if len(hits) else None
