"""Pieces of parameters are stepped to the bits that the whole has there: codes, scales, masters, weights."""

import pytest
import torch
from torch import nn

from lowprec_train.group import SINGLE
from lowprec_train.ops import library
from lowprec_train.optim.norm import norm_and_squares
from lowprec_train.optim.shard import Shard
from tests.optim.cases import BUNDLES, MASTERS, MOMENTS, build
from tests.optim.shards import (
    SHAPES,
    Cut,
    advance,
    along,
    differences,
    first_weights,
    gradients,
    optimizer,
    tensors,
    together,
)

LAYOUTS = [(2, 1), (4, 1), (1, 2), (2, 2), (1, 8)]  # (ranks along rows, along columns)
PAIRS = [(first, "fp16") for first in MOMENTS] + [("fp32", second) for second in MOMENTS]
FOUND = (0.0, 0.0, 1.0, 0.0)  # of the steps: one is skipped


def poisoned(step):
    """Gradients of a step; an infinity in one shard where the step is skipped."""
    made = gradients(step)
    if FOUND[step]:
        made["weight"][30, 70] = torch.inf
    return made


def run_whole(system, observer=None, **options):
    parameters, adamw = optimizer(first_weights(), system, **options)
    history = [tensors(parameters, adamw)]
    for step, found in enumerate(FOUND):
        advance(parameters, adamw, poisoned(step), found=found, observer=observer)
        history.append(tensors(parameters, adamw))
    return history, along(parameters, adamw)


def run_rank(cut, rank, system, observer=None, **options):
    shards = {name: cut.shard(name, rank) for name in SHAPES}
    weights = {name: cut.part(name, rank, whole) for name, whole in first_weights().items()}
    parameters, adamw = optimizer(weights, system, shards, **options)
    history = [tensors(parameters, adamw)]
    for step, found in enumerate(FOUND):
        given = {name: cut.part(name, rank, whole) for name, whole in poisoned(step).items()}
        advance(parameters, adamw, given, found=found, observer=observer)
        history.append(tensors(parameters, adamw))
    return history


def assert_same(layout, system, **options):
    """After no step and after each of four: every tensor of the shards, joined, is that of the whole."""
    wanted, cut_along = run_whole(system, **options)
    cut = Cut(*layout)
    histories = cut.on_threads(lambda rank: run_rank(cut, rank, system, **options))
    for step, whole in enumerate(wanted):
        parts = [history[step] for history in histories]
        assert not differences(together(cut, parts, cut_along, whole), whole), (layout, system, step)
    return cut


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", BUNDLES)
def test_the_shipped_optimizers(name, layout):
    assert_same(layout, name if name != "stable_adamw" else "adamw", clip_updates=name == "stable_adamw")


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(("layout", "clip"), [((2, 2), True), ((4, 1), False)], ids=str)
def test_every_codec(layout, master, clip):
    """Also where weights are drawn, and where their scale hangs on a clipped update."""
    for pair in PAIRS:
        assert_same(layout, (*pair, master), clip_updates=clip)


@pytest.mark.parametrize("name", ["adamw", "adamw_coat", "adamw_fp8lm"])
def test_the_equations_of_coded_state_on_fp32(name):
    assert_same((2, 2), name, fused=False)


@pytest.mark.parametrize("system", ["adamw_coat", "adamw_fp4", "bf16", ("fp32", "bf16", "fp32")], ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_beside_the_fused_op(system, clip, monkeypatch):
    """It takes what needs neither other ranks nor a place in the whole; the rest goes one by one, to the same bits."""
    monkeypatch.setitem(library.SERVED, "cpu", library.SERVED["cpu"] | {"adamw"})
    assert_same((2, 2), system, clip_updates=clip)


@pytest.mark.parametrize(
    ("system", "clip", "calls"),
    [
        ("adamw", False, []),
        ("adamw_coat", False, []),
        ("bf16", False, []),
        ("adamw_fp4", False, ["all_reduce_max"]),
        ("adamw_coat", True, ["all_reduce_sum"]),
        ("adamw_fp8lm", True, ["all_reduce_sum", "all_reduce_max"]),
    ],
)
def test_one_collective_for_all_tensors(system, clip, calls):
    """Four matrices and their numbers travel together, once a step; the first weights' once before."""
    cut = assert_same((2, 1), system, clip_updates=clip)
    before = ["all_reduce_max"] if system == "adamw_fp8lm" else []
    assert cut.everyone[0].calls == cut.everyone[1].calls == before + calls * len(FOUND)


def test_the_observer_sees_the_parts_of_what_is_rounded():
    """An empty part is shown too, so that all ranks see the same calls."""

    def watch(seen):
        def observer(parameter, what, *values):
            seen.setdefault((tuple(parameter.shape), what), []).append([value.clone() for value in values])

        return observer

    cut, whole, parts = Cut(4, 1), {}, [{} for _ in range(4)]
    run_whole("adamw_fp8lm", observer=watch(whole))
    cut.on_threads(lambda rank: run_rank(cut, rank, "adamw_fp8lm", observer=watch(parts[rank])))
    for name in ("weight", "low"):
        shapes = [cut.shard(name, rank).local for rank in range(4)]
        for what in ("exp_avg", "exp_avg_sq", "master"):
            seen = [part[shape, what] for part, shape in zip(parts, shapes, strict=True)]
            for step, wanted in enumerate(whole[SHAPES[name], what]):
                joined = [torch.cat([each[step][place] for each in seen]) for place in range(3)]
                assert len({len(each) for each in seen}) == 1
                assert all(torch.equal(a, b) or b.isnan().any() for a, b in zip(joined, wanted, strict=True))
    assert any(shape[0] == 0 for part in parts for shape, _ in part)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_norm_of_all_gradients(layout):
    """The same bits in all layouts and on all ranks, within the rounding of torch's sums of FP32."""
    made, cut = gradients(0), Cut(*layout)
    made["wide"] *= 1e-12
    made["weight"] *= 1e5

    def norm(rank):
        parameters, shards = {}, {}
        for name in SHAPES:
            part = made[name] if rank is None else cut.part(name, rank, made[name])
            parameters[name] = nn.Parameter(torch.zeros_like(part))
            parameters[name].grad = part.clone()
            if rank is not None:
                shards[parameters[name]] = cut.shard(name, rank)
        return norm_and_squares(parameters.values(), shards)[0]

    whole = norm(None)
    torch.testing.assert_close(whole, nn.utils.get_total_norm(list(made.values())), rtol=1e-6, atol=0)
    exact = sum(each.double().square().sum() for each in made.values()).sqrt()
    assert whole == exact.float() and whole.dtype == torch.float32 and whole.ndim == 0
    assert all(torch.equal(each, whole) for each in cut.on_threads(norm))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_reaches_every_norm(bad):
    made, cut = gradients(0), Cut(2, 2)
    made["weight"][0, 0] = bad

    def norm(rank):
        parameter = nn.Parameter(cut.part("weight", rank, made["weight"]))
        parameter.grad = parameter.detach().clone()
        return norm_and_squares([parameter], {parameter: cut.shard("weight", rank)})[0]

    assert not any(each.isfinite() for each in cut.on_threads(norm))


def test_no_gradients_have_no_norm():
    assert norm_and_squares([nn.Parameter(torch.ones(3))])[0] == 0.0


@pytest.mark.parametrize(
    ("system", "columns", "words"),
    [
        ("adamw_coat", (20, 20), "columns 20 to 40 of 64.*multiples of 8"),
        ("bf16", (20, 20), "column 20 of 64.*8 columns"),
        ("adamw_fp4", (32, 16), r"shape \(4, 32\).*shape \(4, 16\)"),
    ],
)
def test_shards_that_cannot_be(system, columns, words):
    first, width = columns
    weight = nn.Parameter(torch.zeros(4, 32 if width == 16 else width))
    shard = Shard(shape=(4, 64), first=(0, first), local=(4, width), group=SINGLE)
    with pytest.raises(ValueError, match=words):
        build([weight], system, shards={weight: shard})
