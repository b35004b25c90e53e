"""Block estimates against closed forms, another fit, and their own promises in simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from lowprec_train.tools.study.statistics import BlockFit, holm, seeds_needed

ARMS = ("bf16", "fp8", "fp4", "mxfp4", "nvfp4", "coat")
EFFECTS = dict(zip(ARMS, (0.0, 0.001, -0.02, 0.03, 0.01, 0.0), strict=True))


def drawn(generator, seeds=4, s=0.004, noise=None, arms=ARMS):
    """Losses of arms with known effects on seeds whose own effects are much larger."""
    blocks = generator.normal(3.5, 0.05, seeds)
    noise = noise or dict.fromkeys(arms, s)
    return {
        (arm, seed): float(blocks[seed] + EFFECTS[arm] + generator.normal(0, noise[arm]))
        for seed in range(seeds)
        for arm in arms
    }


def test_balanced_blocks_are_the_closed_form():
    losses = drawn(np.random.default_rng(1))
    table = np.array([[losses[arm, seed] for seed in range(4)] for arm in ARMS])
    fit = BlockFit(losses)
    residuals = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    s = math.sqrt((residuals**2).sum() / (5 * 3))
    assert fit.freedom == 15 and fit.s == pytest.approx(s)
    found = fit.difference("fp4", "bf16")
    assert found.nats == pytest.approx(table[2].mean() - table[0].mean())
    assert found.error == pytest.approx(s * math.sqrt(2 / 4))
    assert found.half == pytest.approx(2.1314495 * s * math.sqrt(2 / 4))
    assert found.at_most - found.nats == pytest.approx(1.7530504 * s * math.sqrt(2 / 4))
    assert fit.mean("coat") == pytest.approx(table[5].mean())


def test_two_arms_are_a_paired_t_test():
    losses = drawn(np.random.default_rng(2), arms=ARMS[:2])
    pairs = [[losses[arm, seed] for seed in range(4)] for arm in ARMS[:2]]
    expected = stats.ttest_rel(pairs[1], pairs[0])
    fit = BlockFit(losses)
    for found in (fit.difference("fp8", "bf16"), fit.paired("fp8", "bf16")):
        assert found.p == pytest.approx(expected.pvalue) and found.freedom == 3
        low, high = expected.confidence_interval(0.95)
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_unbalanced_blocks_against_normal_equations():
    """Arms on other numbers of seeds: an independent fit with the first seed as reference."""
    losses = {
        key: value for key, value in drawn(np.random.default_rng(3)).items() if sum(map(ord, key[0])) % 4 != key[1]
    }
    keys, y = list(losses), np.array(list(losses.values()))
    columns = [[arm == other for other, _ in keys] for arm in ARMS] + [
        [s == seed for _, s in keys] for seed in (1, 2, 3)
    ]
    x = np.array(columns, float).T
    inverse = np.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ y
    s2 = ((y - x @ beta) ** 2).sum() / (len(y) - x.shape[1])
    c = np.zeros(x.shape[1])
    c[2], c[0] = 1, -1
    fit = BlockFit(losses)
    found = fit.difference("fp4", "bf16")
    assert fit.freedom == len(y) - 9 and found.nats == pytest.approx(c @ beta)
    assert found.error == pytest.approx(math.sqrt(s2 * c @ inverse @ c))
    naive = np.mean([v for (a, _), v in losses.items() if a == "fp4"]) - np.mean(
        [v for (a, _), v in losses.items() if a == "bf16"]
    )
    assert abs(found.nats - EFFECTS["fp4"]) < 0.01 < abs(naive - EFFECTS["fp4"])  # seeds, not arms, make the naive one


def test_arms_without_a_common_seed_are_refused():
    losses = {("bf16", 1): 3.0, ("fp8", 2): 3.0, ("bf16", 3): 3.1, ("fp8", 4): 3.2}
    with pytest.raises(ValueError, match="fp8 and bf16 have no seed in common"):
        BlockFit(losses).difference("fp8", "bf16")
    chained = {("bf16", 1): 3.0, ("coat", 1): 3.1, ("coat", 2): 3.2, ("fp8", 2): 3.4}
    assert BlockFit(chained).difference("fp8", "bf16").nats == pytest.approx(0.3)  # through coat
    assert BlockFit(chained).difference("fp8", "bf16").error is None


@pytest.mark.parametrize("missing", [0, 5])
def test_intervals_cover_as_often_as_they_say(missing):
    generator, covered, below, count = np.random.default_rng(missing), 0, 0, 1500
    for _ in range(count):
        losses = drawn(generator, seeds=3)
        for key in generator.permutation(list(losses))[:missing]:
            losses.pop((str(key[0]), int(key[1])))
        if not {"mxfp4", "bf16"} <= {arm for arm, _ in losses}:
            count -= 1
            continue
        found = BlockFit(losses).difference("mxfp4", "bf16")
        covered += found.low <= EFFECTS["mxfp4"] <= found.high
        below += found.at_most >= EFFECTS["mxfp4"]
    assert 0.935 < covered / count < 0.965 and 0.935 < below / count < 0.965  # four standard errors are 0.02


def test_an_arm_of_other_noise_gets_intervals_of_its_own():
    generator, noise = np.random.default_rng(5), dict.fromkeys(ARMS, 0.001) | {"fp4": 0.03}
    covered = flagged = pooled = 0
    for _ in range(300):
        fit = BlockFit(drawn(generator, seeds=6, noise=noise))
        flagged += fit.uneven
        found, all_alike = fit.compared("fp4", "bf16"), fit.difference("fp4", "bf16")
        covered += found.low <= EFFECTS["fp4"] <= found.high
        pooled += all_alike.low <= EFFECTS["fp4"] <= all_alike.high
    assert flagged > 240 and 0.88 < covered / 300 < 0.98 and pooled / 300 < 0.8
    even = [BlockFit(drawn(generator, seeds=6)).uneven for _ in range(300)]
    assert sum(even) < 15


def test_seeds_of_one_arm_alone_do_not_make_noise_uneven():
    """Twelve seeds that only the baseline has leave residuals of zero, which say nothing of its noise."""
    generator, arms = np.random.default_rng(6), ARMS[:4]
    keys = [(arm, seed) for seed in range(4) for arm in arms] + [(arms[0], seed) for seed in range(4, 16)]
    fits = [BlockFit({key: float(generator.normal()) for key in keys}) for _ in range(400)]
    spread = np.mean([[(fit.spread(arm) / fit.s) ** 2 for arm in arms] for fit in fits], axis=0)
    assert np.all(abs(spread - 1) < 0.1), spread
    assert sum(fit.uneven for fit in fits) < 24  # without leverage in half of them
    plain = BlockFit({key: fits[0].losses[key] for key in keys[:16]})
    assert fits[0].levene == pytest.approx(plain.levene) and fits[0].spread("bf16") == pytest.approx(
        plain.spread("bf16")
    )


def test_holm_against_its_definition():
    assert holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert holm([0.5, 0.001]) == [0.5, 0.002] and holm([]) == []
    generator, false = np.random.default_rng(7), 0
    for _ in range(1000):  # any of four true nulls refused, all compared with one baseline
        losses = drawn(generator, seeds=3)
        null = {(arm, seed): value - EFFECTS[arm] for (arm, seed), value in losses.items()}
        fit = BlockFit(null)
        false += min(holm([fit.difference(arm, "bf16").p for arm in ARMS[1:5]])) < 0.05
    assert false / 1000 < 0.065


def test_the_seeds_that_a_width_needs():
    assert seeds_needed(0.004, 15, 0.0061) == math.ceil(2 * (2.1314495 * 0.004 / 0.0061) ** 2) == 4


def test_equal_losses_have_no_interval_of_chance():
    fit = BlockFit({(arm, seed): 3.0 + seed for arm in ARMS for seed in range(3)})
    assert fit.difference("fp8", "bf16").nats == pytest.approx(0, abs=1e-12)
    assert fit.s == pytest.approx(0, abs=1e-12)
