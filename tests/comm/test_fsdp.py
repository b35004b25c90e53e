"""Gradients through `fully_shard` with our reductions: FP64 sums, in every layout of four ranks, for every codec."""

import math

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from lowprec_train import config
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import all_reduce_bytes, reduce_scatter_bytes
from lowprec_train.comm.fsdp import Reduction, attach, encoded
from lowprec_train.comm.layout import sharded_layout
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32
from tests.comm.fsdp_cases import CASES, LAYOUTS, PLAIN, RANKS, SHAPES, UNITS
from tests.comm.fsdp_processes import READ, everything
from tests.distributed import run_distributed

SHARES = {"e4m3": 0.0265, "e5m2": 0.053, "bf16": 0.00166}  # S9: of sqrt(sum_i |g_i|^2), one rounding
ROUNDINGS = {"shard": 1, "hybrid": 2, "replicate": 2}  # of a contribution and of the sum that it became part of
NOT_FINITE = "blocks.1.first.wide"


@pytest.fixture(scope="module")
def on_cpus():
    """What each rank saw over gloo."""
    return run_distributed(everything, RANKS, "cpu")


@pytest.fixture(scope="module")
def on_gpus():
    """What each rank saw over NCCL."""
    return run_distributed(everything, RANKS, "cuda", backend="nccl")


@pytest.fixture(params=["on_cpus", pytest.param("on_gpus", marks=pytest.mark.gpu)])
def results(request):
    return request.getfixturevalue(request.param)


def contributions(case, name):
    """What each rank puts in: its micro-batches added up in FP32."""
    batches = range(case.micro_batches)
    pieces = [[case.gradient(rank, i, name, SHAPES[name]).to(case.dtype).float() for i in batches] for rank in range(4)]
    return [sum(each[1:], each[0]) for each in pieces]


def share_of(value, parts):
    """|error| / sqrt(sum_i |g_i|^2)."""
    parts = torch.stack(parts).double()
    return ((value.double() - parts.sum(0)).norm() / parts.square().sum().sqrt()).item()


def in_order(parts, layout):
    """FP32 sums over the shard axis, whose ranks are neighbours, then over the replicas."""
    replicas, shards = LAYOUTS[layout]
    sums = [sum(each[1:], each[0]) for each in (parts[r * shards : (r + 1) * shards] for r in range(replicas))]
    return sum(sums[1:], sums[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["fp32", "last", "bf16-parameters"])
def test_fp32_sums_are_exact(results, name, layout):
    """Bit for bit the sums in rank order, so neither divided nor counted twice; then the parameters' own dtype."""
    case = CASES[name]
    for parameter in SHAPES:
        expected = in_order(contributions(case, parameter), layout).to(case.dtype)
        for result in results:
            assert torch.equal(result[layout, name]["gradients"][parameter], expected), parameter


def test_one_axis_adds_as_one_process_does_and_hybrid_sharding_by_groups(results):
    """In rank order, as one process accumulates; two axes: (g0 + g1) + (g2 + g3), a bound away and not the same."""
    apart = False
    for parameter in SHAPES:
        parts = contributions(CASES["fp32"], parameter)
        alone = ((parts[0] + parts[1]) + parts[2]) + parts[3]
        bound = 2 * 3 * 2.0**-24 * torch.stack(parts).abs().sum(0)
        for result in results:
            found = {layout: result[layout, "fp32"]["gradients"][parameter] for layout in LAYOUTS}
            assert torch.equal(found["shard"], alone) and torch.equal(found["replicate"], alone)
            assert torch.equal(found["hybrid"], (parts[0] + parts[1]) + (parts[2] + parts[3]))
            assert ((found["hybrid"] - alone).abs() <= bound).all()
            apart |= not torch.equal(found["hybrid"], alone)
    assert apart


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", READ)
def test_gradients_that_peers_read_are_those_that_are_sent(results, name, layout):
    """Bit for bit, with the bytes and errors that are reported."""
    for result in results:
        sent, read = result[layout, name], result["read by peers"][layout, name]
        assert sent["metrics"] == read["metrics"]
        for parameter in SHAPES:
            assert torch.equal(sent["gradients"][parameter], read["gradients"][parameter]), parameter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_at_every_micro_batch(results, layout):
    case = CASES["each"]
    for parameter, shape in SHAPES.items():
        batches = [[case.gradient(rank, i, parameter, shape) for rank in range(RANKS)] for i in range(3)]
        sums = [in_order(batch, layout) for batch in batches]
        for result in results:
            assert torch.equal(result[layout, "each"]["gradients"][parameter], sums[0] + sums[1] + sums[2]), parameter


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "last-e4m3", "each-e4m3", "bf16-parameters-e4m3"])
def test_error_of_every_parameter(results, name, layout):
    """S9 for each rounding on the way, although magnitudes of neighbours differ by 1e9; plain ones as in BF16."""
    case = CASES[name]
    rounded = SHARES[case.reduction.codec.format.name.lower()], SHARES["bf16"]
    for parameter in SHAPES:
        share = rounded[parameter in PLAIN] * math.sqrt(ROUNDINGS[layout])
        parts = contributions(case, parameter)
        if case.dtype is torch.bfloat16:
            norm = torch.stack(parts).sum(0).norm() / torch.stack(parts).norm()
            share = math.hypot(share, SHARES["bf16"] * norm)
        for result in results:
            assert share_of(result[layout, name]["gradients"][parameter], parts) < 1.1 * share, parameter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_error_of_a_shared_scale(results, layout):
    for parameter in SHAPES:
        parts = contributions(CASES["shared"], parameter)
        for result in results:
            assert share_of(result[layout, "shared"]["gradients"][parameter], parts) < 0.06


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "share"), [("identical", 0.028), ("identical-shared", 0.028), ("silent", 0.042)])
def test_agreeing_and_silent_ranks(results, name, share, layout):
    """Equal errors add up as the gradients do: the error of the sum is a share of the sum, and nothing saturates."""
    for parameter in SHAPES:
        parts = contributions(CASES[name], parameter)
        exact = torch.stack(parts).double().sum(0)
        scale = exact.norm() if name != "silent" else torch.stack(parts).double().norm()
        for result in results:
            error = (result[layout, name]["gradients"][parameter].double() - exact).norm()
            assert error < share * scale, parameter


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["zeros", "zeros-shared"])
def test_zeros_are_exact(results, name, layout):
    assert not any(value.any() for result in results for value in result[layout, name]["gradients"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "lost"), [("nan", 256), ("nan-fp32", 1), ("nan-shared", 37 * 96)])
def test_not_a_number_reaches_its_owners(results, name, lost, layout):
    """Every copy of the element sees it, a block or a parameter goes with it, and nothing else."""
    for result in results:
        finite = {parameter: value.isfinite() for parameter, value in result[layout, name]["gradients"].items()}
        assert not finite[NOT_FINITE][36, 95] and (~finite[NOT_FINITE]).sum() <= lost
        assert all(each.all() for parameter, each in finite.items() if parameter != NOT_FINITE)


def test_ranks_agree(results):
    """Also on what was measured and on mu."""
    for key in ((layout, name) for layout in LAYOUTS for name in CASES if "nan" not in name):
        for result in results[1:]:
            assert result[key]["metrics"] == pytest.approx(results[0][key]["metrics"], nan_ok=True)
            assert all(torch.equal(v, results[0][key]["state"][n]) for n, v in result[key]["state"].items())
            pairs = zip(result[key]["gradients"].values(), results[0][key]["gradients"].values(), strict=True)
            assert all(torch.equal(mine, first) for mine, first in pairs)


def test_vectors_are_left_alone(results):
    assert all(torch.equal(result["shard", "fp32"]["vector"], torch.ones(16)) for result in results)


# --- how a unit's buffer is laid out ------------------------------------------------------------------------------


def test_the_order_is_that_of_fully_shard(results):
    assert all(result["orders"] == [list(unit) for unit in UNITS] for result in results)


def test_the_layout_is_that_of_the_buffer(results):
    """Each gradient is whole, and its range in a row is its first dimension over the ranks, rounded up."""
    for rank, result in enumerate(results):
        assert len(result["buffers"]) == len(UNITS)
        for gradients, sizes, coded in result["buffers"]:
            firsts = [gradient.flatten()[0].item() for gradient in gradients]
            unit = next(unit for unit in UNITS if [number(rank, name) for name in unit] == firsts)
            assert coded == [name not in PLAIN for name in unit]
            for gradient, size, (name, shape) in zip(gradients, sizes, unit.items(), strict=True):
                assert torch.equal(gradient, torch.full(shape, number(rank, name))), name
                assert size == math.prod([-(-shape[0] // RANKS), *shape[1:]])


def number(rank, name):
    return 100.0 * rank + list(SHAPES).index(name) + 1


def test_a_step_leaves_no_gradient_in_flight(results):
    cases = [result[layout, case] for result in results for layout in LAYOUTS for case in CASES]
    assert all(each["in flight"] is None for each in cases)


def test_every_parameter_needs_a_gradient(results):
    assert all("without one: blocks.1.second.cube" in result["without"] for result in results)


# --- what is measured, and the head-room --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["e4m3", "bf16", "fp32", "shared", "each-e4m3"])
def test_bytes_are_counted(results, name, layout):
    replicas, shards = LAYOUTS[layout]
    codec, expected = CASES[name].reduction.codec, 0
    for unit in UNITS:
        plain = [each for each in PLAIN if each in unit]
        row = sharded_layout(unit, shards, plain)
        expected += reduce_scatter_bytes(codec, row, shards) + all_reduce_bytes(codec, row, replicas)
    times = CASES[name].micro_batches
    assert all(result[layout, name]["metrics"]["comm/grad_bytes"] == times * expected for result in results)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "shared", "identical-shared-full", "each-e4m3"])
def test_sqnr_is_that_of_the_sums(results, name, layout):
    """Against FP64, over all parameters: the largest decide."""
    signal = noise = 0.0
    for parameter, shape in SHAPES.items():
        case = CASES[name]
        batches = [[case.gradient(r, i, parameter, shape) for r in range(RANKS)] for i in range(case.micro_batches)]
        signal += sum(part.double().square().sum() for batch in batches for part in batch)
        exact = torch.stack([part for batch in batches for part in batch]).double().sum(0)
        noise += (results[0][layout, name]["gradients"][parameter].double() - exact).square().sum()
    db = 10 * math.log10(signal / noise)
    assert results[0][layout, name]["metrics"]["comm/grad_sqnr_db"] == pytest.approx(db, abs=0.7)


def test_what_loses_nothing_is_not_measured(results):
    assert all(set(result["shard", "fp32"]["metrics"]) == {"comm/grad_bytes"} for result in results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saturation_is_seen_and_answered(results, layout):
    """At mu = 1 equal gradients leave the range; the next step has half of it on every axis that has company."""
    for result in results:
        full = result[layout, "identical-shared-full"]
        assert full["metrics"]["comm/grad_at_maximum"] > 0.1 and full["metrics"]["comm/grad_mu"] == 1.0
        replicas, shards = LAYOUTS[layout]
        assert full["state"]["level"].tolist() == [-1000 if ranks > 1 else 0 for ranks in (shards, replicas)]


def test_head_room_moves_once_a_step(results):
    """Whatever the number of units; measured every sixteenth step."""
    for result in results:
        history, state = result["followed"]
        mu = [step["comm/grad_mu"] for step in history]
        assert mu == pytest.approx([0.5 * 2 ** (step / 1000) for step in range(40)], rel=1e-6)
        assert state["level"].tolist() == [-960, -960]
        measured = [step["comm/grad_sqnr_db"] for step in history]
        assert len(set(measured)) == 3 and len(set(measured[:16])) == len(set(measured[16:32])) == 1


def test_a_resumed_run_measures_what_it_would_have_measured(results):
    """Cut within an interval, at its end and within the next: other rows, other steps would be other decibels."""
    for result in results:
        assert result["parts"] == result["alone"]
        for history in result["alone"].values():
            measured = [step["comm/grad_sqnr_db"] for step in history]
            assert [len(set(measured[a:b])) for a, b in ((0, 16), (16, 32), (32, 36), (0, 36))] == [1, 1, 1, 3]


def test_head_room_is_for_a_number_of_ranks(results):
    """A checkpoint of as many ranks continues; for others mu starts anew, where nothing can saturate."""
    fresh = {1: 0, 2: -1000, 4: -2000}
    for result in results:
        for (layout, other), levels in result["resumed"].items():
            here, there = (LAYOUTS[name][::-1] for name in (layout, other))
            expected = [-5 if a == b else fresh[a] for a, b in zip(here, there, strict=True)]
            assert levels == [0 if ranks == 1 else level for ranks, level in zip(here, expected, strict=True)]


# --- without processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "codec"),
    [
        ("bf16", BlockScaledCodec(BF16)),
        ("fp32", BlockScaledCodec(FP32)),
        ("fp8", BlockScaledCodec(E4M3)),
        ("fp8_e5m2", BlockScaledCodec(E5M2)),
        ("fp8_lm", SharedScaleCodec(E4M3)),
    ],
)
def test_configured_reductions(choice, codec):
    assert choice in config.choices("comm")
    node = OmegaConf.load(config.directory() / "comm" / f"{choice}.yaml")
    reduction = instantiate({**node, "exclude": ["*.embedding.*"]}, _convert_="all")
    assert (reduction.codec, reduction.exclude) == (codec, ("*.embedding.*",)) and hash(reduction)


def without_patterns(name):
    return Reduction(codec=CASES[name].reduction.codec)


@pytest.mark.parametrize(("name", "state"), [("e4m3", {}), ("shared", {"level": [0, 0], "ranks": [1, 1]})])
def test_one_process_has_nothing_to_reduce(name, state):
    """Its state has the form that it has with many, so that a checkpoint of either fits the other."""
    reducer = attach(nn.Linear(4, 4), reduction=without_patterns(name), shard_group=None)
    reducer.finish_step()
    assert reducer.metrics() == {"comm/grad_bytes": 0.0}
    assert {key: value.tolist() for key, value in reducer.state_dict().items()} == state
    reducer.load_state_dict(reducer.state_dict())


def test_patterns_must_match():
    reduction = Reduction(codec=BlockScaledCodec(E4M3), exclude=("*.weight", "*.tiny"))
    with pytest.raises(ValueError, match=r"'\*\.tiny'; names are blocks\.0\.weight, blocks\.0\.bias"):
        attach(nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(2, 2))}), reduction=reduction, shard_group=None)


@pytest.mark.parametrize("measured", [True, False])
def test_steps_that_are_not_measured_do_not_count(measured):
    """A run that goes on with measurements begins with one."""
    reducer = attach(nn.Linear(4, 4), reduction=encoded(), shard_group=None, measured=measured)
    for _ in range(3):
        reducer.end_backward()
        reducer.finish_step()
    assert reducer.sampling.state_dict()["steps"] == 3 * measured
