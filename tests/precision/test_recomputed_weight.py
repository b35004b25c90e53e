"""Weights that are rounded once more in the backward pass: the bits of saved codes, without saving them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.model.joint_graph import partitioned
from lowprec_train.model.transformer import compile_method
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.numerics.quantizer import Quantized
from lowprec_train.precision.linear_plan import OperandPlan
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.policy import attach_draws
from lowprec_train.precision.recipe import LinearRecipe, override
from lowprec_train.recipes import fp4_fold, fp8, mxfp4, w4a8
from tests.precision.layers import DATA, DTYPES, linear, make, run
from tests.precision.test_saved import saved
from tests.recipes import RECIPES, system

M, K, N = SIZES = (256, 384, 640)
REUSING = [name for name, recipe in RECIPES.items() if recipe.needs_weight_codes]
CPU = torch.device("cpu")
SETTING = "precision.override.recompute_weight_codes=true"


def rounded_again(recipe: LinearRecipe) -> LinearRecipe:
    return override(recipe, {"recompute_weight_codes": True})


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", REUSING)
def test_the_bits_of_saved_codes(name, data, format):
    x, w, dy = make(data, format, SIZES)
    saving, rounding = (
        run(linear(recipe, w), x, dy, format) for recipe in (RECIPES[name], rounded_again(RECIPES[name]))
    )
    for expected, found in zip(saving, rounding, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", REUSING)
def test_no_code_of_the_weight_is_saved(name):
    x, w, _ = make(DATA[0], "BF16", SIZES)
    before, after = (saved(linear(recipe, w), x) for recipe in (RECIPES[name], rounded_again(RECIPES[name])))
    sizes = [{t.numel() for t in tensors if t.element_size() == 1} for tensors in (before, after)]
    assert sizes[0] & {N * K, N * K // 2} and not sizes[1] & {N * K, N * K // 2}, sizes
    assert sum(t.nbytes for t in after) < sum(t.nbytes for t in before) - N * K // 2


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fp8", "fp4", "quartet2", "w4a8", "int8_switchback"])
def test_compiled_nothing_of_the_weight_is_saved(name, master):
    """Neither codes nor the weight as it was cast for them; and the bits are those of an eager run that saves codes.
    640 tokens, so that no activation has as many elements as a weight.
    """
    found, kept = [], []
    for compiled in (False, True):
        one = system(name, "llama_tiny", "model.recompute=none", *[SETTING] * compiled)
        model = one.model.to(master)
        attach_draws(model, one.seeds.at(0, 0))
        block = model.blocks[0]
        if compiled:
            torch._dynamo.reset()
            compile_method(block, "forward", fullgraph=True, backend=partitioned)
        x = torch.randn(10, 64, model.dim, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = block(x, model.position.angles(64), None)
        there = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = [t.numel() for t in kept if t.untyped_storage().data_ptr() not in there]
        kept.clear()
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in block.parameters())])
    weights = {p.numel() for p in block.parameters() if p.dim() == 2}
    assert not {n for n in sizes if n in weights or 2 * n in weights}, (sizes, weights)
    for eager, again in zip(*found, strict=True):
        assert torch.equal(eager, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", REUSING)
def test_on_a_gpu(name, dtype):
    """Compiled by Inductor: the bits of saved codes, and less memory between the passes."""
    found, held, weight = [], [], torch.randn(1024, 512, generator=torch.Generator().manual_seed(1)).numpy()
    for recipe in (RECIPES[name], rounded_again(RECIPES[name])):
        torch._dynamo.reset()
        layer = linear(recipe, weight).cuda().to(dtype)
        layer.draws = SeedTable(3, 1, torch.device("cuda")).at(0, 0).site(0)
        generator = torch.Generator("cuda").manual_seed(2)
        x = torch.randn(256, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
        dy = torch.randn(256, 1024, device="cuda", generator=generator).bfloat16()
        step = torch.compile(layer, fullgraph=True)
        step(x).backward(dy)
        x.grad = layer.weight.grad = None
        before = torch.cuda.memory_allocated()
        y = step(x)
        held.append(torch.cuda.memory_allocated() - before)
        y.backward(dy)
        found.append((y, x.grad, layer.weight.grad))
    assert held[1] <= held[0] - 1024 * 512 // 2, held
    for saving, rounding in zip(*found, strict=True):
        assert torch.equal(saving, rounding)


def test_each_operand_is_observed_once():
    x, w, dy = make(DATA[0], "BF16", SIZES)
    layer, names = linear(rounded_again(w4a8.recipe()), w), []

    def observe(operand: OperandPlan, matrix: Tensor, codes: Quantized) -> None:
        names.append(operand.name)

    layer.observer = observe
    run(layer, x, dy, "BF16")
    assert sorted(names) == ["W", "X", "dY", "dY^T"]


def test_what_the_plan_says():
    shape = (N, K)
    plan = compile_plan(rounded_again(fp8.recipe()), shape, M, CPU)
    assert plan.saved_w is None and plan.describe()["fprop"]["W"] == "fresh, quantize; rounded again for dgrad"
    gathered = compile_plan(rounded_again(fp8.recipe()), shape, M, CPU, gathered=True)
    assert gathered == compile_plan(fp8.recipe(), shape, M, CPU, gathered=True)


@pytest.mark.parametrize("build", [fp4_fold.recipe, mxfp4.recipe])
def test_refused_where_dgrad_needs_no_codes_of_the_weight(build):
    with pytest.raises(ValueError, match="recompute_weight_codes=true needs a dgrad that uses fprop's codes of W, not"):
        rounded_again(build())
