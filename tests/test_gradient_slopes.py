"""The script behind the slopes of docs/recipes/fp8.md, on a smaller model."""

import pytest
import torch

from lowprec_train.recipes import bf16, fp8
from scripts import gradient_slopes

LAYERS = 3


def test_slopes_are_those_of_the_gradients():
    """One block at a time and all together, from the gradients themselves."""
    exact, rounded = (
        gradient_slopes.gradients(recipe, LAYERS, 0) for recipe in (bf16.recipe(), fp8.recipe(gradient="E4M3"))
    )
    each = [float(torch.dot(g, e) / torch.dot(e, e)) for g, e in zip(rounded, exact)]
    together = float(torch.dot(torch.cat(rounded), torch.cat(exact)) / torch.cat(exact).square().sum())
    assert gradient_slopes.slopes("E4M3", LAYERS, 1) == pytest.approx([*each, together], rel=1e-12)


def test_e5m2_shrinks_gradients_more_than_e4m3():
    (*_, coarse), (*_, fine) = gradient_slopes.slopes("E5M2", LAYERS, 2), gradient_slopes.slopes("E4M3", LAYERS, 2)
    assert 0.95 < coarse < fine < 1.0
