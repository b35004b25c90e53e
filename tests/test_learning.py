"""Every recipe, with its own optimizer codecs and kept activations, learns a task that no dead network can pass."""

from __future__ import annotations

from itertools import product

import pytest

from tests.copy_task import losses
from tests.recipes import MODELS, SYSTEMS, system

DAILY = ("bf16", "fp8", "coat", "fp4", "mxfp4", "nvfp4", "int8_switchback")
"""One recipe of each kind: tensor, row and block scales, draws, outliers and slopes, codecs of moments."""


def by_day_or_night():
    """`DAILY` by day with one of the models, which alternate; the other pairs by night. By day the losses of every
    recipe fall beside those of BF16 (tests/test_smoke.py).
    """
    for (number, recipe), (place, model) in product(enumerate(SYSTEMS), enumerate(MODELS)):
        day = number % len(MODELS) == place and recipe in DAILY
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
