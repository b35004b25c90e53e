"""The statistics against hand-computed numbers and against their own promises on seeded noise."""

import math

import numpy as np
import pytest

from lowprec_train.tools import curves
from lowprec_train.tools.runs import Series


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


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_a_steep_start_are_no_spikes(seed):
    assert curves.spikes(series(falling(seed=seed))) == []


def test_spikes_are_found_with_place_height_and_length():
    loss = falling()
    loss[8] += 3.0
    loss[200:203] += [0.6, 0.9, 0.5]
    first, second = curves.spikes(series(loss))
    assert (first.step, first.length) == (9, 1) and first.excess == pytest.approx(3.0, abs=0.3)
    assert (second.step, second.length) == (202, 3) and second.loss == loss[201]
    assert second.excess == pytest.approx(0.9, abs=0.15) and second.sigmas == pytest.approx(0.9 / 0.05, rel=0.25)


def test_a_step_down_is_no_spike_and_a_last_value_can_be_one():
    loss = falling()
    loss[300] -= 2.0
    loss[-1] += 1.0
    assert [spike.step for spike in curves.spikes(series(loss))] == [400]


def test_spike_threshold_is_six_robust_sigmas():
    """Two residuals of three are 0.01 either way, so sigma is 0.014826 and the threshold 0.089 above the median, 3."""
    loss = 2.99 + 0.01 * (np.arange(102) % 3)
    for height, found in ((0.08, 0), (0.10, 1)):
        loss[50] = 3.0 + height
        assert len(curves.spikes(series(loss))) == found


def test_spikes_leave_non_finite_values_to_others():
    loss = falling()
    loss[[5, 100]] = np.nan, np.inf
    assert curves.spikes(series(loss)) == []
    assert curves.spikes(series([np.nan, np.nan])) == []


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
