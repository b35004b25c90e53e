"""The statistics against hand-computed numbers and against their own promises on seeded noise."""

import math

import numpy as np
import pytest

from lowprec_train.tools.compare import curves
from lowprec_train.tools.compare.runs import Series


def series(values, steps=None):
    return Series(
        steps=np.arange(1, len(values) + 1) if steps is None else np.array(steps), values=np.array(values, float)
    )


def ar1(rng, trials, n, rho):
    """Stationary AR(1) noise of unit innovations, one trial a row."""
    x = rng.standard_normal((trials, n))
    x[:, 0] /= math.sqrt(1 - rho**2)
    for t in range(1, n):
        x[:, t] += rho * x[:, t - 1]
    return x


def test_smooth_is_the_mean_of_the_last_values():
    assert curves.smooth(np.array([4.0, 2.0, 6.0, 1.0]), 2).tolist() == [4.0, 3.0, 4.0, 3.5]
    assert curves.smooth(np.array([4.0, 2.0]), 1).tolist() == [4.0, 2.0]
    assert curves.smooth(np.array([4.0, 2.0]), 5).tolist() == [4.0, 3.0]


def test_smooth_keeps_non_finite_values_in_their_windows():
    smoothed = curves.smooth(np.array([1.0, np.nan, 3.0, 5.0, 7.0]), 2)
    assert np.array_equal(smoothed, [1.0, np.nan, np.nan, 4.0, 6.0], equal_nan=True)


def test_drawn_curves_by_hand():
    """Windows of three: the first value, means, and the line through the last three at its end."""
    values = np.array([9.0, 3.0, 3.0, 6.0, 0.0])
    assert curves.drawn(values, 3).tolist() == [9.0, 5.0, 4.0, 3.0, 3.0 - 1.5]
    assert curves.drawn(values, 4).tolist() == curves.drawn(values, 3).tolist()  # no window is even
    assert curves.drawn(values, 2).tolist() == values.tolist()
    assert curves.drawn(values, 99).tolist() == pytest.approx([9.0, 5.0, 4.2, 2.7, 1.2])
    assert curves.drawn(np.array([2.0]), 30).tolist() == [2.0]
    spoiled = curves.drawn(np.array([1.0, np.nan, 3.0, 5.0, 7.0, 9.0]), 3)
    assert np.array_equal(spoiled, [1.0, np.nan, np.nan, 5.0, 7.0, 9.0], equal_nan=True)


@pytest.mark.parametrize("window", [1, 2, 30, 31, 200])
def test_drawn_curves_reach_the_last_step_and_follow_a_slope(window):
    """A straight fall is drawn as it is, to its end; noise is averaged there too."""
    line = 5.0 - 0.01 * np.arange(150)
    assert np.abs(curves.drawn(line, window) - line).max() < 1e-12
    noisy = line + 0.05 * np.random.default_rng(0).standard_normal((300, 150))
    ends = np.array([curves.drawn(row, window)[-1] for row in noisy]) - line[-1]
    size = max(1, min(window, 150) - (min(window, 150) + 1) % 2)
    assert abs(ends.mean()) < 0.01 and ends.std() == pytest.approx(0.05 * min(1, 2 / math.sqrt(size)), rel=0.15)


def test_interval_by_hand():
    """Six batches of two equal values; about their mean the batch means have a sum of squares of 10."""
    means = np.array([1.0, 3.0, 2.0, 4.0, 3.0, 5.0])
    found = curves.interval(np.repeat(means, 2))
    slope = (-2.5 * 1 - 1.5 * 3 - 0.5 * 2 + 0.5 * 4 + 1.5 * 3 + 2.5 * 5) / 17.5
    half = 2.776 * math.sqrt((10.0 - slope**2 * 17.5) / 4 / 6)
    assert (found.mean, found.points) == (3.0, 12)
    assert found.low == pytest.approx(3.0 - half, rel=1e-12) and found.high == pytest.approx(3.0 + half, rel=1e-12)


def test_interval_ignores_a_straight_fall():
    found = curves.interval(np.linspace(5.0, 4.0, 60))
    assert found.mean == pytest.approx(4.5) and found.high - found.low < 1e-12


@pytest.mark.parametrize("values", [[1.0] * 5, [1.0] * 20 + [np.nan], [1.0] * 20 + [np.inf]])
def test_interval_says_when_it_cannot_tell(values):
    found = curves.interval(np.array(values))
    assert found.low is None and found.high is None
    assert found.mean == pytest.approx(np.mean(values), nan_ok=True)


@pytest.mark.parametrize(
    ("n", "rho", "least"), [(30, 0.0, 0.935), (60, 0.0, 0.935), (60, 0.3, 0.925), (200, 0.6, 0.925)]
)
def test_interval_covers_the_mean_95_times_in_100(n, rho, least):
    """2000 falling curves of correlated noise; the binomial standard error of the coverage is 0.005."""
    trials = 2000
    noise = ar1(np.random.default_rng(1), trials, n, rho) - 0.05 * np.arange(n)
    truth = -0.05 * (n - 1) / 2
    found = [curves.interval(row) for row in noise]
    coverage = np.mean([each.low <= truth <= each.high for each in found])
    assert least <= coverage <= 0.965


def test_independent_steps_would_promise_too_much():
    """The textbook standard error covers a correlated mean far less often: the test above can fail."""
    noise = ar1(np.random.default_rng(1), 2000, 200, 0.6)
    half = 1.96 * noise.std(axis=1, ddof=1) / math.sqrt(200)
    assert np.mean(np.abs(noise.mean(axis=1)) <= half) < 0.75


def falling(n=400, noise=0.05, seed=0):
    steps = np.arange(n)
    return 4 + 4.5 * np.exp(-steps / 30) + noise * np.random.default_rng(seed).standard_normal(n)


NOISES = {
    "Gaussian": lambda rng, n: rng.standard_normal(n),
    "Student's t, 5": lambda rng, n: rng.standard_t(5, n),
    "Laplace": lambda rng, n: rng.laplace(size=n),
    "Gumbel": lambda rng, n: rng.gumbel(size=n),
    "lognormal": lambda rng, n: np.exp(0.5 * rng.standard_normal(n)),
    "correlated": lambda rng, n: ar1(rng, 1, n, 0.9)[0] * math.sqrt(1 - 0.9**2),
    "larger early": lambda rng, n: rng.standard_normal(n) * (1 + 4 * np.exp(-np.arange(n) / (n / 10))),
    "two levels": lambda rng, n: rng.standard_normal(n) * np.where(np.arange(n) % 200 < 100, 1, 3),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_and_a_steep_start_are_no_spikes(name):
    """300 falling curves of each noise, the demo's length and a longer one: at most one of them has a spike."""
    rng = np.random.default_rng(0)
    found = []
    for n, trials in ((70, 220), (240, 80)):
        fall = 4 + 4.5 * np.exp(-np.arange(n) / max(8, n / 14))
        found += [curves.spikes(series(fall + 0.06 * NOISES[name](rng, n))) for _ in range(trials)]
    assert sum(map(bool, found)) <= 1


SHAPES = {
    "one step": [1.2],
    "recovers in 8 steps": 0.6 * np.exp(-np.arange(8) / 3),
    "recovers in 30 steps": 0.8 * np.exp(-np.arange(30) / 10),
    "stays 12 steps": np.full(12, 0.5),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_spikes_in_noise_are_found_where_they_are(shape):
    """50 places on a curve of 600 steps with noise of 0.05 nat: 48 or more are found, as one spike each."""
    rng, hits = np.random.default_rng(1), 0
    for at in rng.integers(150, 600 - len(shape), 50):
        loss = falling(600, seed=at)
        loss[at : at + len(shape)] += shape
        found = curves.spikes(series(loss))
        hits += len(found) == 1 and at + 1 <= found[0].step <= at + len(shape)
    assert hits >= 48


def test_spikes_are_found_with_place_height_and_length():
    loss = falling()
    loss[8] += 3.0
    loss[200:203] += [0.6, 0.9, 0.5]
    first, second = curves.spikes(series(loss))
    assert (first.step, first.length) == (9, 1) and first.excess == pytest.approx(3.0, abs=0.3)
    assert (second.step, second.length) == (202, 3) and second.loss == loss[201]
    assert second.excess == pytest.approx(0.9, abs=0.15)
    assert second.reaches == pytest.approx(0.9 / 0.05 / 1.645, rel=0.25)


def test_a_step_down_is_no_spike_and_a_last_value_can_be_one():
    loss = falling()
    loss[300] -= 2.0
    loss[-1] += 1.2
    assert [spike.step for spike in curves.spikes(series(loss))] == [400]


def test_limits_of_spikes():
    """Two steps of three are 0.01 off 3, and 0.015 off the middle of their neighbours, which says the more of noise."""
    steps = np.arange(102) % 3 - 1
    unit = 1.645 * 1.4826 * 0.015 / math.sqrt(1.5)
    for heights, found in (([8.9], 0), ([9.1], 1), ([9.1, 3], 1), ([3, 4.1, 3], 1), ([3, 3.9, 3], 0), ([1, 4.1, 3], 0)):
        loss = 3 + 0.01 * steps
        loss[50 : 50 + len(heights)] = 3 + unit * np.array(heights)
        assert len(curves.spikes(series(loss))) == found, heights
    for height, found in ((0.049, 0), (0.051, 1)):
        loss = 3 + 0.0001 * steps
        loss[50] = 3 + height
        assert len(curves.spikes(series(loss))) == found


def test_spikes_leave_non_finite_values_to_others():
    loss = falling()
    loss[[5, 100]] = np.nan, np.inf
    assert curves.spikes(series(loss)) == []
    assert curves.spikes(series([np.nan, np.nan])) == []
    assert curves.spikes(series([3.0, np.nan])) == curves.spikes(series([3.0, 2.0])) == []


def test_common_steps():
    steps, run, baseline = curves.at_common_steps(series([1, 2, 3], [2, 4, 6]), series([5, 6, 7], [1, 2, 6]))
    assert steps.tolist() == [2, 6] and run.tolist() == [1, 3] and baseline.tolist() == [6, 7]


def test_common_tokens_interpolate_within_both_ranges():
    run = np.array([100.0, 300.0, 500.0]), np.array([5.0, 3.0, 2.0])
    baseline = np.array([50.0, 100.0, 200.0, 300.0, 400.0, 600.0]), np.arange(6.0)
    tokens, values, reference = curves.at_common_tokens(run, baseline)
    assert tokens.tolist() == [100, 200, 300, 400]
    assert values.tolist() == [5.0, 4.0, 3.0, 2.5] and reference.tolist() == [1, 2, 3, 4]


def test_common_tokens_take_own_points_beside_a_hole():
    run = np.array([1.0, 2.0, 3.0]), np.array([5.0, np.nan, 2.0])
    values = curves.at_common_tokens(run, (np.array([1.0, 2.0, 3.0]), np.zeros(3)))[1]
    assert np.array_equal(values, [5.0, np.nan, 2.0], equal_nan=True)


def test_first_at_most():
    assert curves.first_at_most(np.array([3.0, np.nan, 2.0, 1.0]), 2.0) == 2
    assert curves.first_at_most(np.array([3.0]), 2.0) is None
