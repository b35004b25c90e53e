"""Ranks stop after the same step, whoever was asked and when; and the one that comes last is found."""

import pytest

from lowprec_train.train.stop_consensus import StopConsensus
from tests.distributed import run_distributed
from tests.train.agreeing_ranks import ASKED, DELAY, RANKS, SIGNALS, STEPS, work


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(work, RANKS)


@pytest.mark.parametrize("case", ASKED)
def test_all_stop_one_step_after_the_first_request(ranks, case):
    first = min(ASKED[case].values(), default=STEPS)
    askers = [rank for rank, step in ASKED[case].items() if step == first]
    made = first + 2 if first + 2 <= STEPS else None
    learned = max((SIGNALS[rank] for rank in askers), default=0)
    assert [seen[case] for seen in ranks] == [(made, learned)] * RANKS


def test_the_rank_that_comes_last_is_found(ranks):
    first, *messages = zip(*(seen["stragglers"] for seen in ranks), strict=True)
    assert set(map(str, (*first, *messages[0]))) == {"{}"}, "nothing has arrived yet"
    for step, metrics in enumerate(messages[1:]):
        assert all(each == metrics[0] for each in metrics), "all ranks say the same"
        assert metrics[0]["time/step_ms_max"] == 100 * step + RANKS - 1
        assert metrics[0]["time/step_ms_min"] == 100 * step
        assert metrics[0]["time/data_ms_max"] == RANKS - 1
    for metrics in messages[2:]:
        assert metrics[0]["time/slowest_rank"] == 1
        assert 0.5 * DELAY * 1e3 < metrics[0]["time/late_ms_max"] < 4 * DELAY * 1e3


def test_nobody_waits_for_the_step_under_way(ranks):
    """While rank 2 is late the others go on at once; they wait for it one step later."""
    for rank in (0, 1):
        now, later = ranks[rank]["unhurried"]
        assert now < 0.5 * DELAY < later


def test_one_process_decides_at_once():
    consensus = StopConsensus()
    assert not consensus.agree(False) and consensus.metrics() == {} and consensus.learned == 0
    assert consensus.agree(10) and consensus.learned == 10
    consensus.close()
