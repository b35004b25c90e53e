"""Phases of a run: which step is in which, what a switch of the forward pass alone leaves as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import resolve
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.schedule import Phase, PrecisionSchedule, first_step, forward_only
from lowprec_train.recipes import bf16, fp8, mxfp4
from tests.recipes import RECIPES, build

TOKENS, IN, OUT = 256, 128, 256


@pytest.mark.parametrize(("at", "steps", "first"), [(0.9, 300, 270), (0.82, 100, 82), (0.5, 3, 2), (0.9, 20, 18)])
def test_a_fraction_of_a_run_is_a_step(at, steps, first):
    assert first_step(at, steps) == first


@pytest.mark.parametrize(("at", "steps"), [(0.0, 10), (1.0, 10), (-0.1, 10), (1.5, 10), (0.99, 10), (0.01, 10)])
def test_a_phase_without_steps_is_an_error(at, steps):
    with pytest.raises(ValueError, match=str(at)):
        first_step(at, steps)


@pytest.mark.parametrize("starts", [[], [1], [0, 5, 5], [0, 7, 3]])
def test_phases_begin_at_zero_and_ascend(starts):
    with pytest.raises(ValueError, match="ascending"):
        PrecisionSchedule([Phase(first_step=start, recipes={}) for start in starts])


def test_each_step_has_its_phase_in_any_order():
    model, _ = build(fp8.recipe())
    tables = [resolve(model, {"*": recipe}) for recipe in (fp8.recipe(), mxfp4.recipe(), bf16.recipe())]
    schedule = PrecisionSchedule([Phase(first_step=s, recipes=t) for s, t in zip((0, 3, 5), tables, strict=True)])
    down = model.blocks[1].mlp.down
    for step in (0, 1, 2, 3, 4, 5, 6, 2, 4, 0):  # a resumed run begins anywhere
        schedule.begin(model, step)
        assert down.recipe == tables[0 if step < 3 else 1 if step < 5 else 2]["blocks.1.mlp.down"]


def passes(recipe: LinearRecipe) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, dX, dW) of one layer on fixed data."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(IN, OUT, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUT, IN, generator=generator) * 0.1)
    layer.recipe = recipe
    x = torch.randn(TOKENS, IN, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, OUT, generator=generator).bfloat16()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_a_forward_switch_leaves_the_backward_pass_alone(name):
    """Y is BF16's bit for bit; dX and dW are the recipe's own, estimator aside: the weight is not rounded."""
    before = RECIPES[name]
    switched = forward_only(before, bf16.recipe())
    y, dx, dw = passes(switched)
    assert torch.equal(y, passes(bf16.recipe())[0])
    straight = replace(before, estimator=StraightThrough())
    own_y, own_dx, own_dw = passes(straight)
    assert torch.equal(dx, own_dx) and torch.equal(dw, own_dw)
    assert before.fprop.is_identity or not torch.equal(y, own_y)
    assert isinstance(switched.estimator, StraightThrough)


def test_a_forward_switch_to_another_format_takes_its_codes():
    switched = forward_only(RECIPES["fp4"], fp8.recipe())
    assert switched.fprop == fp8.recipe().fprop and switched.dgrad == RECIPES["fp4"].dgrad
    assert torch.equal(passes(switched)[0], passes(fp8.recipe())[0])


def test_a_forward_switch_that_takes_the_codes_away_is_an_error():
    with pytest.raises(ValueError, match="input codes"):
        forward_only(fp8.recipe(), LinearRecipe(fprop=type(fp8.recipe().fprop)(b=fp8.recipe().fprop.b)))
