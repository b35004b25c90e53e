"""Every recipe, with its own optimizer codecs and kept activations, learns a task that no dead network can pass."""

from __future__ import annotations

from itertools import product

import pytest

from tests.copy_task import losses
from tests.recipes import BY_NIGHT, MODELS, SYSTEMS, system


def by_day_or_night():
    """Every recipe but those of `BY_NIGHT` by day with one of the models, which alternate; the other pairs by night."""
    for (number, recipe), (place, model) in product(enumerate(SYSTEMS), enumerate(MODELS)):
        day = number % len(MODELS) == place and recipe not in BY_NIGHT
        yield pytest.param(recipe, model, marks=[] if day else pytest.mark.nightly)


@pytest.mark.parametrize(("recipe", "model"), list(by_day_or_night()))
def test_recipe_learns_to_copy(recipe, model):
    seen = losses(system(recipe, model), steps=150, goal=0.1)
    assert seen[0] > 4
    assert min(seen) < 0.1, f"{recipe}: {seen[-5:]} after {len(seen)} steps"


def test_model_without_attention_cannot_copy():
    """Blocks whose attention is silenced keep all parameters and all their precision: the loss stays at log 64."""
    deaf = system("bf16", "gpt_tiny")
    for block in deaf.model.blocks:
        block.attention.out.weight.data.zero_()
        block.attention.out.weight.requires_grad_(False)
    seen = losses(deaf, steps=60, goal=0.1)
    assert min(seen) > 4
