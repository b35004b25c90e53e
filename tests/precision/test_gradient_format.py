"""`+precision/gradient=e4m3`: dY of any recipe that rounds it to E5M2, on the path that it had."""

import pytest
import torch

from lowprec_train.numerics.formats import E4M3, E5M2
from lowprec_train.precision import gemm
from lowprec_train.train import build
from tests.recipes import composed

GPU = torch.device("cuda", 0)


def layout(*overrides):
    """dY's format of each quantised backward GEMM, and its path on a GPU, by layer."""
    laid_out = build.layout(composed(*overrides))
    recipes = laid_out.phases[0].recipes
    plans = laid_out.plans(GPU)[0]
    return {
        (name, which): (getattr(recipe, which).a.format, plans[name].paths()[which])
        for name, recipe in recipes.items()
        for which in ("dgrad", "wgrad")
        if not getattr(recipe, which).is_identity
    }


@pytest.mark.parametrize("recipe", ["fp8", "fp8_lm", "coat", "fp4", "fp4_mixed"])
def test_gradients_in_e4m3_take_the_same_path(recipe, monkeypatch):
    monkeypatch.setattr(gemm, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)
    shipped, named = layout(f"+recipe={recipe}"), layout(f"+recipe={recipe}", "+precision/gradient=e4m3")
    assert {format for format, _ in shipped.values()} == {E5M2}
    assert {format for format, _ in named.values()} == {E4M3}
    assert {key: path for key, (_, path) in named.items()} == {key: path for key, (_, path) in shipped.items()}
    assert all(path.startswith("fp8") for _, path in named.values())
