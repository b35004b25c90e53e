"""What one op does for two GEMMs is what single ops do for each: fused passes against observed ones, op by op.

Where scales leave the sum at another place (folded carriers), products agree to the rounding of their FP32 sums; codes
of all other recipes and everything made from them agree bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, FP16, INT8, STOCHASTIC
from lowprec_train.numerics.pairs import both, pairs
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe
from tests.precision.layers import DATA, U, linear, make
from tests.recipes import RECIPES

SIZES = (256, 384, 128)


def passes(recipe: LinearRecipe, data: tuple, dtype: torch.dtype, watched: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = data
    layer = linear(recipe, w)
    layer.observer = (lambda *_: None) if watched else None
    leaf = torch.from_numpy(x).to(dtype).requires_grad_()
    y = layer(leaf)
    y.backward(torch.from_numpy(dy).to(dtype))
    assert leaf.grad is not None and layer.weight.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", RECIPES)
def test_fused_passes_are_the_single_ones(name, data, dtype):
    given = make(data, "BF16", SIZES)
    fused, single = (passes(RECIPES[name], given, dtype, watched) for watched in (False, True))
    folded = name.startswith("mxfp4")
    for one, other, k in zip(fused, single, (SIZES[1], SIZES[2], SIZES[0])):
        assert one.isfinite().all()
        if not folded:
            assert torch.equal(one, other)
            continue
        bound = (k + 8) * U * 64 + (2.0**-8 if one.dtype == torch.bfloat16 else 0)
        scale = other.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        assert ((one.float() - other.float()).abs() <= bound * scale).all()


@pytest.mark.parametrize("format", [E2M1, E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize(
    "tiles", [((-1, -1), (-1, -1)), ((1, -1), (1, -1)), ((1, 128), (1, 128)), ((128, 128), (128, 128))]
)
@pytest.mark.parametrize("rule", [ScaleRule.FP32, ScaleRule.POW2])
def test_both_is_one_after_the_other(format, tiles, rule):
    x = torch.from_numpy(np.random.default_rng(1).standard_t(2, (256, 384))).to(torch.bfloat16)
    across, down = torch.rand(1, 384) + 0.1, torch.rand(256, 1) + 0.1
    first, second = (Quantizer(format, tile=tile, scale=rule) for tile in tiles)
    for a, d in ((None, None), (across, None), (None, down), (across, down)):
        plain, transposed = both(x, first, second, across=a, down=d)
        want = first(x.float() if a is None else x.float() * a)
        want_t = second((x.float() if d is None else x.float() * d).t().contiguous())
        for got, expected in ((plain, want), (transposed, want_t)):
            assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(got.scale, expected.scale)


def test_a_turned_quantizer_makes_the_same_codes():
    x = torch.randn(64, 96)
    row = Quantizer(E2M1, tile=(1, -1))
    codes, transposed = both(x, row, row.transposed())
    assert torch.equal(codes.codes.float().t(), transposed.codes.float()) and torch.equal(
        codes.scale.t(), transposed.scale
    )
    assert row.transposed().transposed() == row


def test_what_pairs():
    row = Quantizer(E4M3, tile=(1, -1))
    assert pairs(row, Quantizer(E4M3))
    for other in (
        Quantizer(E5M2, tile=(1, -1)),
        Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2),
        Quantizer(E4M3, tile=(1, -1), rounding=STOCHASTIC),
        Quantizer(E4M3, tile=(1, -1), headroom=0.5),
        Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.POW2, exponent_span=14),
    ):
        assert not pairs(row, other)
    assert not pairs(Quantizer(FP16), Quantizer(FP16))  # two bytes a code
    block = Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4)
    assert not pairs(block, block)
