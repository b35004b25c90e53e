"""Reductions over two nodes of two ranks, over gloo: the simulation's bits, the same on every rank; bytes by link."""

import itertools
import math
from collections import Counter

import pytest
import torch

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import (
    all_reduce_bytes,
    all_reduce_links,
    reduce_scatter_bytes,
    reduce_scatter_links,
)
from lowprec_train.comm.fsdp import encoded
from lowprec_train.comm.nodes import links, ring
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, FP32
from lowprec_train.parallel.mesh import AXES, Sizes, check_nodes, groups_along, node_ranks
from tests.comm import simulation
from tests.comm.cases import CASES, RANKS, ranges, row
from tests.comm.fsdp_cases import CASES as MODELS
from tests.comm.fsdp_cases import SHAPES
from tests.comm.node_processes import MODEL_CASES, NODE, work
from tests.comm.test_collectives import same_bits
from tests.comm.test_fsdp import NOT_FINITE, contributions
from tests.distributed import run_distributed

EXACT = [name for name, case in CASES.items() if not case.codec.shares_scales]


@pytest.fixture(scope="module")
def results():
    return run_distributed(work, RANKS)


def test_places(results):
    """Number on the node, and of the node."""
    assert [each["places"] for each in results] == [(2, 0, 0), (2, 1, 0), (2, 0, 1), (2, 1, 1)]


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_simulation(results, name):
    """Sums inside of nodes in rank order, one more rounding, sums of nodes; an all-reduce rounds the result again."""
    case = CASES[name]
    how = (case.flats, ranges(case.layout), case.codec.format.name, case.codec.block, NODE)
    if case.kind == "reduce_scatter":
        expected = simulation.reduce_scatter_by_node(*how)
    else:
        expected = [simulation.all_reduce_by_node(*how)] * RANKS
    for rank, value in enumerate(expected):
        assert same_bits(results[rank][name][0], value), rank


@pytest.mark.parametrize("name", EXACT)
def test_bytes_are_what_is_sent(results, name):
    case = CASES[name]
    count = reduce_scatter_links if case.kind == "reduce_scatter" else all_reduce_links
    expected = count(case.codec, case.layout, RANKS, NODE)
    assert all(each[name][1] == expected._asdict() for each in results)


def test_not_finite_on_one_rank_reaches_its_owner_or_all(results):
    for name in ("nan", "inf"):
        assert [not each[name][0].isfinite().all() for each in results] == [False, True, False, False]
    for name in ("nan-everywhere", "inf-in-bf16"):
        assert not any(each[name][0].isfinite().all() for each in results)


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODEL_CASES)
def test_ranks_agree(results, name):
    first, *others = (each["model", name] for each in results)
    for gradients, metrics in others:
        assert all(same_bits(value, first[0][key]) for key, value in gradients.items())
        assert metrics == pytest.approx(first[1], nan_ok=True)


def test_fp32_sums_are_those_of_nodes(results):
    for parameter in SHAPES:
        parts = contributions(MODELS["fp32"], parameter)
        expected = (parts[0] + parts[1]) + (parts[2] + parts[3])
        assert torch.equal(results[0]["model", "fp32"][0][parameter], expected), parameter


@pytest.mark.parametrize("name", ["e4m3", "bf16"])
def test_sqnr_counts_both_roundings(results, name):
    signal = noise = 0.0
    for parameter in SHAPES:
        parts = torch.stack(contributions(MODELS[name], parameter)).double()
        signal += parts.square().sum()
        noise += (results[0]["model", name][0][parameter].double() - parts.sum(0)).square().sum()
    found = results[0]["model", name][1]["comm/grad_sqnr_db"]
    assert found == pytest.approx(10 * math.log10(signal / noise), abs=0.7)


def test_a_measured_row_counts_both_of_its_roundings(results):
    """Whichever row it is, and however small: two roundings of independent gradients lose 3 dB more than one."""
    signal, noise = torch.stack([each["measured"] for each in results]).sum(0).unbind(1)
    assert (10 * torch.log10(signal / noise)).tolist() == pytest.approx([28.4] * 4, abs=0.8)
    assert signal[0] < signal[1:].min() * 1e-3


@pytest.mark.parametrize("name", ["fp32", "e4m3", "each-e4m3", "shared"])
def test_a_run_tells_its_links_apart(results, name):
    """Two of four ranks are on the other node: one row of three leaves the node, of codes under a shared scale two."""
    metrics = results[0]["model", name][1]
    of_three = 2 if name == "shared" else 1
    assert metrics["comm/grad_bytes_nic"] == metrics["comm/grad_bytes"] * of_three / 3


def test_not_a_number_reaches_its_owner(results):
    gradients = results[0]["model", "nan"][0]
    assert not gradients[NOT_FINITE][36, 95].isfinite()
    assert all(value.isfinite().all() for name, value in gradients.items() if name != NOT_FINITE)


# --- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("format", [E4M3, BF16, FP32])
def test_a_nic_carries_no_more_than_in_a_ring(node, nodes, format):
    """Of the same payload, reduced or all-reduced; together with NVLink it is what is sent."""
    layout, codec, ranks = row(1 << 16, 1 << 12), BlockScaledCodec(format), node * nodes
    found = reduce_scatter_links(codec, layout, ranks, node)
    assert sum(found) == reduce_scatter_bytes(codec, layout, ranks)
    assert found.nic <= ring(codec.row_bytes(layout), ranks, node).nic and (found.nic == 0) == (nodes == 1)
    both = all_reduce_links(codec, row(1 << 20), ranks, node)
    assert sum(both) == all_reduce_bytes(codec, row(1 << 20), ranks)


def test_a_flat_exchange_sends_more():
    """Eight nodes of eight: seven and a half times through each NIC."""
    assert links(100, 64, 8) == (5600, 700) and links(100, 64, 8, flat=True) == (700, 5600)
    assert ring(100, 64, 8) == (5513, 787)
    assert reduce_scatter_links(SharedScaleCodec(), row(100), 64, 8).nic == 5600


def test_ranks_of_a_node():
    """Of an axis: neighbours, ranks that lie apart, and ranks that lie unequally."""
    sizes = Sizes(dp_replicate=2, dp_shard=4, tp=2)
    assert node_ranks(groups_along(sizes, "dp_shard"), 8) == 4
    assert node_ranks(groups_along(sizes, "dp_shard"), 4) == 2
    assert node_ranks(groups_along(sizes, "dp_replicate"), 8) == 1
    assert node_ranks(groups_along(sizes, "dp_replicate"), 16) == 2
    assert node_ranks(groups_along(Sizes(dp_replicate=2, dp_shard=6), "dp_shard"), 4) is None


@pytest.mark.parametrize(
    ("sizes", "node_size", "words"),
    [
        (Sizes(dp_shard=8), 3, "comm.node_size=3 does not divide 8 processes"),
        (Sizes(dp_replicate=2, dp_shard=6), 4, "the 6 ranks of dp_shard do not spread evenly over the nodes"),
    ],
)
def test_nodes_that_do_not_divide_are_refused(sizes, node_size, words):
    with pytest.raises(ValueError, match=words):
        check_nodes(sizes, node_size)
    check_nodes(sizes, None)
    check_nodes(sizes, 2)


def test_nodes_of_nothing_are_refused():
    assert encoded(node_size=4).node_size == 4
    with pytest.raises(ValueError, match="comm.node_size=0"):
        encoded(node_size=0)
    with pytest.raises(ValueError, match="nodes of 3 ranks do not divide 8 ranks"):
        links(1, 8, 3)


@pytest.mark.parametrize("axis", AXES)
def test_ranks_of_a_node_are_counted_group_by_group(axis):
    for replicate, shard, tp, node in itertools.product((1, 2, 3), (1, 2, 4, 6), (1, 2, 3), (1, 2, 3, 4, 8, 16)):
        groups = groups_along(Sizes(dp_replicate=replicate, dp_shard=shard, tp=tp), axis)
        counts = {count for group in groups.tolist() for count in Counter(rank // node for rank in group).values()}
        assert node_ranks(groups, node) == (counts.pop() if len(counts) == 1 else None)
