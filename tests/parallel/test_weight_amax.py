"""Maxima under tensor parallelism, counted for a block: weights' once a step, activations' at their products; the bits
are those of ranks that ask each other at every product. Ranks are threads (tests/groups.py).
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lowprec_train.group import SINGLE
from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer, compile_method
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.parallel import tensor
from lowprec_train.parallel.weight_amax import WeightAmax
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import apply_policy
from lowprec_train.recipes import bf16
from tests.groups import Recorded, among
from tests.parallel.test_tensor import SIZES, batch
from tests.recipes import LLAMA, RECIPES

# maxima of a block, forward: without agreed ones, with them; backward
MAXIMA = {
    "bf16": (0, 0, 0),
    "fp8": (8, 4, 4),
    "fp8_rowwise": (4, 4, 4),  # a number a row
    "fp8_block": (0, 0, 0),
    "mxfp8": (0, 0, 0),
    "nvfp4": (8, 4, 4),
    "mxfp4_fp8": (8, 4, 4),
}


def part(group, layers, recipe, recompute="none"):
    with torch.device("meta"):
        sizes = {**SIZES, **LLAMA, "layers": layers, "recompute": recompute}
        model = Transformer(Architecture(**sizes), dtype=torch.bfloat16)
    tensor.apply(model, group)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(group.rank)

    def fill(name, parameter, first_value):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.ndim == 1))

    model.init_weights(0, fill)
    apply_policy(model, {"blocks.*": RECIPES[recipe], "*": bf16.recipe()})
    return model


def passed(recipe, layers, agreed, recompute="none"):
    """What each rank sends in `prepare`, forward, and backward; its loss and gradients."""

    def body(threads):
        group, counts = Recorded(threads), []
        model = part(group, layers, recipe, recompute)
        if agreed:
            WeightAmax(model, dtype=torch.bfloat16, groups=[group]).prepare()
        counts.append(Counter(group.calls))
        loss = model.loss(*batch(), 100.0, None, SeedTable(0, model.number_sites()).at(3, 8))
        counts.append(Counter(group.calls))
        loss.backward()
        counts.append(Counter(group.calls))
        return counts, [loss.detach(), *(p.grad for p in model.parameters())]

    return among(2, body)


def of_a_block(name, recipe, agreed, recompute="none"):
    """How many such collectives a second block adds to prepare, forward and backward."""
    one, two = (passed(recipe, layers, agreed, recompute)[0][0] for layers in (1, 2))
    ends = [b[name] - a[name] for a, b in zip(one, two, strict=True)]
    return ends[0], ends[1] - ends[0], ends[2] - ends[1]


@pytest.mark.parametrize("recipe", MAXIMA)
def test_maxima_of_a_block(recipe):
    asked, agreed, backward = MAXIMA[recipe]
    assert of_a_block("all_reduce_max", recipe, agreed=False) == (0, asked, backward)
    assert of_a_block("all_reduce_max", recipe, agreed=True) == (0, agreed, backward)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_recomputed_block_does_not_repeat_its_last_reduce_scatter(recipe):
    """Two of dX, and of the outputs only attention's: the block's own output is not needed again."""
    assert of_a_block("reduce_scatter", recipe, agreed=True) == (0, 2, 2)
    assert of_a_block("reduce_scatter", recipe, agreed=True, recompute="full") == (0, 2, 3)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_one_collective_for_all_weights_and_the_same_bits(recipe):
    before, after = (passed(recipe, 2, agreed) for agreed in (False, True))
    for (_, expected), (counts, found) in zip(before, after, strict=True):
        assert counts[0] == {"all_reduce_max": 1}
        assert expected[0].isfinite()
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_numbers_are_those_of_whole_weights_and_go_after_the_step():
    def body(group):
        model = part(group, 1, "fp8")
        agreed = WeightAmax(model, dtype=torch.bfloat16, groups=[group])
        agreed.prepare()
        layers = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
        found = {name: each.weight_amax for name, each in layers.items()}
        local = {name: each.weight.detach().bfloat16().abs().amax().float() for name, each in layers.items()}
        agreed.finish()
        assert all(each.weight_amax is None for each in layers.values())
        return found, local

    (found, first), (other, second) = among(2, body)
    assert found["head"] is None and len(found) == 5
    for name in found.keys() - {"head"}:
        assert found[name] == other[name] == max(first[name], second[name]) and found[name].shape == (1, 1)


def test_a_weight_that_is_not_finite_is_infinite_everywhere():
    """And its codes are NaN on every rank, as where ranks ask each other."""

    def body(group):
        model = part(group, 1, "fp8")
        if group.rank == 1:
            model.blocks[0].mlp.down.weight.data[3, 4] = torch.nan
        WeightAmax(model, dtype=torch.bfloat16, groups=[group]).prepare()
        return model.blocks[0].mlp.down.weight_amax

    assert all(each == torch.inf for each in among(2, body))


def test_new_numbers_need_no_new_graph():
    """Of compiled blocks, step by step, an evaluation in between."""
    torch._dynamo.reset()
    model, counter = part(SINGLE, 1, "fp8"), CompileCounter()
    (block,) = model.blocks
    compile_method(block, "forward", fullgraph=True, backend=counter)
    agreed, draws = WeightAmax(model, dtype=torch.bfloat16, groups=[SINGLE]), SeedTable(0, model.number_sites())
    for step in range(4):
        agreed.prepare()
        model.loss(*batch(), 100.0, None, draws.at(step, 8)).backward()
        if step % 2:
            agreed.finish()
    assert counter.frame_count == 1
