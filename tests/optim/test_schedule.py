"""Schedules at the steps where they bend."""

import dataclasses
import math

import pytest

from lowprec_train.optim.schedule import Warmup, WarmupCosine, WarmupLinear, WarmupStableDecay, before_decay


def test_warmup_reaches_the_peak_on_its_last_step():
    for schedule in (
        WarmupCosine(peak=2.0, steps=100, warmup_steps=10),
        WarmupLinear(peak=2.0, steps=100, warmup_fraction=0.1),
        WarmupStableDecay(peak=2.0, steps=100, warmup_steps=10),
    ):
        assert [schedule(step) for step in (0, 4, 9)] == [0.2, 1.0, 2.0]


def test_cosine_corner_steps():
    schedule = WarmupCosine(peak=1.0, steps=110, warmup_steps=10, final_fraction=0.1)
    assert schedule(59) == pytest.approx(0.55, abs=1e-15)  # half of the decay is done
    assert schedule(109) == 0.1
    assert schedule(500) == 0.1
    assert schedule(34) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), abs=1e-15)


def test_linear_corner_steps():
    schedule = WarmupLinear(peak=1.0, steps=10, final_fraction=0.0)
    assert [schedule(step) for step in range(10)] == pytest.approx([1 - (step + 1) / 10 for step in range(10)])
    assert schedule(9) == 0.0


def test_stable_phase_is_flat_and_the_tail_ends_at_the_final_fraction():
    schedule = WarmupStableDecay(peak=3.0, steps=100, warmup_steps=5, decay_steps=20, final_fraction=0.5)
    assert {schedule(step) for step in range(4, 80)} == {3.0}
    assert schedule(80) == 3.0 * (0.5 + 0.5 * (1 - 1 / 20))
    assert schedule(89) == 3.0 * 0.75
    assert schedule(99) == 1.5
    root = WarmupStableDecay(peak=1.0, steps=100, decay_fraction=0.16, shape="sqrt")
    assert root(87) == pytest.approx(1 - math.sqrt(0.25), abs=1e-15)
    assert root(99) == 0.0


def test_whole_run_may_decay():
    assert WarmupStableDecay(peak=1.0, steps=10, decay_fraction=1.0)(4) == 0.5


@pytest.mark.parametrize(
    ("make", "values", "complaint"),
    [
        (WarmupCosine, {"peak": -1.0, "steps": 10}, "-1.0"),
        (WarmupCosine, {"peak": float("nan"), "steps": 10}, "nan"),
        (WarmupCosine, {"peak": 1.0, "steps": 0}, "steps=0"),
        (WarmupCosine, {"peak": 1.0, "steps": 10, "warmup_steps": 10}, "10 of 10"),
        (WarmupCosine, {"peak": 1.0, "steps": 10, "warmup_steps": -3}, "-3 of 10"),
        (WarmupCosine, {"peak": 1.0, "steps": 10, "warmup_steps": 2, "warmup_fraction": 0.2}, "2 and 0.2"),
        (WarmupLinear, {"peak": 1.0, "steps": 10, "warmup_fraction": 1.0}, "1.0"),
        (WarmupLinear, {"peak": 1.0, "steps": 10, "final_fraction": 1.5}, "1.5"),
        (WarmupStableDecay, {"peak": 1.0, "steps": 10, "warmup_steps": 6, "decay_steps": 5}, "decay 5"),
        (WarmupStableDecay, {"peak": 1.0, "steps": 2}, "decay 0"),
        (WarmupStableDecay, {"peak": 1.0, "steps": 10, "shape": "cube"}, "cube"),
        (WarmupStableDecay, {"peak": 1.0, "steps": 10, "decay_steps": 1, "decay_fraction": 0.3}, "1 and 0.3"),
    ],
)
def test_bad_values_are_named(make, values, complaint):
    with pytest.raises(ValueError, match=complaint):
        make(**values)


def test_negative_step_is_an_error():
    for make in (WarmupCosine, WarmupLinear, WarmupStableDecay):
        with pytest.raises(ValueError, match="-1"):
            make(peak=1.0, steps=10)(-1)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (WarmupStableDecay(peak=1.0, steps=100, warmup_steps=5, decay_steps=30), (70,)),
        (WarmupStableDecay(peak=1.0, steps=100, decay_fraction=0.2), (80,)),
        (WarmupStableDecay(peak=1.0, steps=100), (80,)),
        (WarmupStableDecay(peak=1.0, steps=100, decay_steps=100), ()),
        (WarmupCosine(peak=1.0, steps=100, warmup_steps=5), ()),
    ],
)
def test_where_a_longer_run_can_be_continued_from(schedule, steps):
    """Up to there a run of twice the length has the same rates, and not beyond."""
    assert before_decay(schedule) == steps
    longer = dataclasses.replace(schedule, steps=200)
    for step in steps:
        assert [schedule(i) for i in range(step)] == [longer(i) for i in range(step)]
        assert schedule(step) != longer(step)


def test_a_schedule_without_a_decay_is_refused():
    with pytest.raises(ValueError, match="Warmup has no decay: choose WarmupLinear, WarmupCosine or WarmupStableDecay"):
        Warmup(peak=1.0, steps=10)
