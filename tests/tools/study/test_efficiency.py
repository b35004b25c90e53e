"""Extra tokens by interpolation, and a scaling law that is found again from losses made by one."""

import math

import numpy as np
import pytest

from lowprec_train.tools.study.efficiency import Law, efficiency, extra_tokens, fit_law, tokens_for
from lowprec_train.tools.study.statistics import Estimate

CURVE = {25: 4.6, 50: 4.3, 100: 4.1}


def test_lengths_of_a_loss():
    assert tokens_for(4.3, CURVE) == pytest.approx(50)
    assert tokens_for(4.2, CURVE) == pytest.approx(50 * math.sqrt(2))
    assert tokens_for(4.0, CURVE) == pytest.approx(100 * math.sqrt(2))  # the last part goes on
    assert tokens_for(4.75, CURVE) == pytest.approx(25 / math.sqrt(2))
    assert tokens_for(3.8, CURVE) is None and tokens_for(5.2, CURVE) is None  # more than twice beyond
    assert tokens_for(4.2, {50: 4.1, 100: 4.2}) is None


def test_what_a_gap_is_worth():
    gap = Estimate(nats=0.1, error=0.05 / 2.2621572, freedom=9)
    found = extra_tokens(gap, 100, CURVE)
    assert [found.share, found.low, found.high] == pytest.approx([2**0.5 - 1, 2**0.25 - 1, 2**0.75 - 1], rel=1e-4)
    assert extra_tokens(gap, 100, {100: 4.1}) is None and extra_tokens(gap, 200, CURVE) is None


TRUE = Law(A=2.0e3, a=0.40, B=8.0e3, b=0.45, g=0.7, E=1.6, error=0.0)
SIZES, LENGTHS = (30e6, 60e6, 130e6), (5e8, 2e9, 8e9, 3.2e10)


def points(law, eff_n=1.0, eff_d=1.0):
    return [(n, d, float(law(np.array(n * eff_n), np.array(d * eff_d)))) for n in SIZES for d in LENGTHS]


def test_the_law_of_the_baseline_and_what_arms_make_of_it():
    law = fit_law(points(TRUE))
    assert law.error < 1e-4
    inside = [(n, d) for n in (40e6, 100e6) for d in (1e9, 2e10)]
    for n, d in inside:
        assert float(law(np.array(n), np.array(d))) == pytest.approx(float(TRUE(np.array(n), np.array(d))), rel=1e-3)
    eff = efficiency(law, points(TRUE, 0.7, 0.95))
    assert eff == pytest.approx((0.7, 0.95), rel=0.03)


def test_too_few_points_determine_no_law():
    assert fit_law(points(TRUE)[:7]) is None
    assert fit_law([point for point in points(TRUE) * 2 if point[0] < 1e8]) is None
    assert efficiency(TRUE, points(TRUE)[:3]) is None
