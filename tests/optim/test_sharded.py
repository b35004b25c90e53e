"""AdamW on what FSDP2 leaves of a model on each of two processes, against one process with both micro-batches."""

import pytest
import torch

from tests.distributed import run_distributed
from tests.optim.cases import SYSTEMS
from tests.optim.sharded import RANKS, on_one, work
from tests.optim.shards import same


@pytest.fixture(scope="module")
def runs():
    return on_one(), run_distributed(work, RANKS)


def joined(parts, wanted):
    """Rows of both ranks, or what both have."""
    if parts[0].shape == wanted.shape and parts[1].shape == wanted.shape:
        assert same(*parts)
        return parts[0]
    return torch.cat([part.view(torch.uint8) if part.element_size() == 1 else part for part in parts])


@pytest.mark.parametrize("name", SYSTEMS)
def test_two_processes_have_the_bits_of_one(name, runs):
    """Weights, codes, scales, masters, step counters, the clipped norm and the RMS of updates, after every step."""
    one, ranks = runs
    for step, whole in enumerate(one[name]):
        parts = [rank[name][step] for rank in ranks]
        assert torch.equal(parts[0]["norm"], whole["norm"]) and torch.equal(parts[1]["norm"], whole["norm"])
        assert torch.equal(parts[0]["rms"], parts[1]["rms"])
        torch.testing.assert_close(parts[0]["rms"], whole["rms"], rtol=1e-6, atol=0)
        different = [
            key
            for key, wanted in whole.items()
            if isinstance(key, tuple) and not same(joined([part[key] for part in parts], wanted), wanted)
        ]
        assert not different, (step, different)


def test_parts_are_uneven_and_one_is_empty(runs):
    shapes = [
        tuple(rank["adamw_coat"][0][name, "value"].shape) for rank in runs[1] for name in ("0.weight", "2.weight")
    ]
    assert shapes == [(3, 32), (1, 64), (2, 32), (0, 64)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_an_observer_gets_the_shards_of_all_matrices_on_every_rank(name, runs):
    """At the second step. One of the three matrices is empty on the second rank."""
    one, ranks = runs
    seen = [run[name][1]["seen"] for run in (one, *ranks)]
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0] > 0) == (name != "adamw") and all(run[name][0]["seen"] == 0 for run in ranks)


@pytest.mark.parametrize("name", ["adamw_fp4", "adamw_fp8lm"])
def test_the_ops_of_a_step_do_not_grow_with_the_parameters(name, runs):
    """Three matrices or thirteen: one fused op a kind of state, one collective a statistic."""
    for rank in runs[1]:
        few, many = rank[f"ops of {name}"]
        assert few == many and len(few) < 50
        assert few.count("_c10d_functional::all_reduce") == 1  # amax; the sums of squares are gathered
        assert few.count("_c10d_functional::all_gather_into_tensor") == 1
        assert few.count("lowprec::adamw_amax") == 1 and few.count("lowprec::adamw") == 2


def test_a_dtensor_needs_its_place(runs):
    assert all("DTensor parameter of shape (5, 32)" in rank["refusal"] for rank in runs[1])
