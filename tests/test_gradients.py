"""At step 0, each recipe's gradients point where BF16's do, layer by layer.

The bounds lie a little below the least cosine seen over the linears of both models (dX, dW), which the table gives as a
comment. DGE rescales FP4's dW element by element, by slopes of 0.2 to 3, so its direction differs by design: mean / rms
of the slope is 0.68.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.recipes import MODELS, SYSTEMS, by_day, system

BOUNDS = {  # recipe -> least cosine with BF16 of (dX, dW) over the linears of the blocks
    "bf16": (1.0 - 1e-6, 1.0 - 1e-6),
    "fp8": (0.99, 0.99),  # 0.993, 0.993
    "fp8_rowwise": (0.995, 0.995),  # 0.997, 0.997
    "fp8_block": (0.995, 0.995),  # 0.997, 0.997
    "mxfp8": (0.995, 0.995),  # 0.997, 0.997
    "fp8_lm": (0.99, 0.99),  # 0.993, 0.993
    "coat": (0.99, 0.99),  # 0.993, 0.993
    "fp4": (0.95, 0.63),  # 0.965, 0.659
    "fp4_mixed": (0.965, 0.95),  # 0.977, 0.962
    "mxfp4": (0.89, 0.88),  # 0.909, 0.899
    "mxfp4_fp8": (0.89, 0.88),  # 0.908, 0.898
    "fp4_fold": (0.95, 0.95),
    "fp8_eden4": (0.95, 0.95),
    "nvfp4": (0.94, 0.94),  # 0.950, 0.953
    "quartet2": (0.95, 0.95),
    "ufp4": (0.96, 0.96),  # 0.971, 0.971
    "reduced_mantissa": (0.98, 0.98),  # 0.987: bits are cut off
    "w4a8": (0.955, 0.955),  # 0.967, 0.968
    "averis": (0.94, 0.94),  # 0.952, 0.956
    "int8_switchback": (0.999, 0.999),  # 0.9996, 0.9997
}


@cache
def gradients(recipe: str, model: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name of each linear in the blocks -> (gradient of its input, gradient of its weight)."""
    one = system(recipe, model, seed=3)
    found: dict[str, torch.Tensor] = {}
    for name, module in one.model.named_modules():
        if name.startswith("blocks.") and isinstance(module, torch.nn.Linear):
            module.register_full_backward_hook(lambda _, grads, __, name=name: found.__setitem__(name, grads[0]))
    tokens = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(2))
    one.model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=one.seeds.at(0, 0)).backward()
    weights = dict(one.model.named_parameters())
    return {name: (dx.float(), weights[f"{name}.weight"].grad.float()) for name, dx in found.items()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", by_day(SYSTEMS))
def test_gradients_point_where_bf16_does(recipe, model):
    expected, seen = gradients("bf16", model), gradients(recipe, model)
    assert len(seen) == len(expected) == 8
    for name, (dx, dw) in seen.items():
        least_dx, least_dw = BOUNDS[recipe]
        assert cosine(dx, expected[name][0]) > least_dx, (name, "dX", cosine(dx, expected[name][0]))
        assert cosine(dw, expected[name][1]) > least_dw, (name, "dW", cosine(dw, expected[name][1]))
        assert 0.5 < (dx.norm() / expected[name][0].norm()).item() < 2, name


def test_bounds_would_catch_a_wrong_rotation():
    """Signs that differ between the operands break the product: the test above would see it."""
    from lowprec_train.precision.hadamard import RandomHadamard

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(32, 128, generator=generator), torch.randn(48, 128, generator=generator)
    rotate = RandomHadamard(64)
    one, other = torch.tensor(5), torch.tensor(6)
    right, wrong = rotate(a, one) @ rotate(b, one).t(), rotate(a, one) @ rotate(b, other).t()
    assert cosine(right, a @ b.t()) > 1 - 1e-6
    assert cosine(wrong, a @ b.t()) < 0.5
