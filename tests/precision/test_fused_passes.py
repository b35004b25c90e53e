"""What one op does for two GEMMs is what single ops do for each: fused passes against observed ones, op by op.

Where scales leave the sum at another place (folded carriers), products agree to the rounding of their FP32 sums; codes
of all other recipes and everything made from them agree bit for bit.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.model.attention import Attention, QKNorm
from lowprec_train.model.layers import Rotary, SwiGLU
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, FP16, INT8, STOCHASTIC
from lowprec_train.numerics.pairs import both, pairs
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.linear import Linear
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


class Ops(TorchDispatchMode):
    """Counts the ops of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[op.name().removeprefix("lowprec::")] += 1
        return op(*args, **kwargs or {})


def swiglu(recipe: LinearRecipe, bias: bool = False) -> tuple[list[Tensor], Counter[str]]:
    """Output and gradients of SwiGLU, and the ops of its backward pass."""
    generator = torch.Generator().manual_seed(3)
    layer = SwiGLU(128, 256, bias)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    layer.gate_up.recipe = layer.down.recipe = recipe
    x = torch.randn(2, 64, 128, generator=generator).bfloat16().requires_grad_()
    y = layer(x)
    with Ops() as seen:
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    return [y.detach(), x.grad, *(each.grad for each in layer.parameters())], seen.count


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_swiglu_with_its_codes_is_the_gradient_and_then_its_codes(name, monkeypatch):
    recipe = RECIPES[name]
    got, ops = swiglu(recipe)
    monkeypatch.setattr(Linear, "with_grad_codes_or_amax", Linear.with_grad_amax)
    want, alone = swiglu(recipe)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    folds = name in ("fp4_fold", "fp8_eden4")
    assert ops["gated_silu_backward_ladder"] == folds and not alone["gated_silu_backward_ladder"]
    assert alone["rotate_fold_ladder"] - ops["rotate_fold_ladder"] == folds


@pytest.mark.parametrize("dy, said", [(torch.ones(8, 16), "float32"), (torch.ones(16, 8).bfloat16().t(), r"\(1, 8\)")])
def test_codes_are_written_over_whole_matrices_of_16_bits_alone(dy, said):
    with pytest.raises(ValueError, match=f"contiguous matrix of 16 bits, not .*{said}"):
        torch.ops.lowprec.gated_silu_backward_ladder(dy, torch.ones(8, 32), None, 0, 1.0, (1, 16), "mse", 11, True)


def attention(recipe: LinearRecipe, kind: type[Attention] = Attention) -> tuple[list[Tensor], Counter[str]]:
    """Output and gradients of attention with rotary positions, and the ops of its backward pass."""
    generator = torch.Generator().manual_seed(3)
    layer = kind(128, 4, 2, False)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    layer.qkv.recipe = layer.out.recipe = recipe
    x = torch.randn(2, 64, 128, generator=generator).bfloat16().requires_grad_()
    y = layer(x, Rotary(64, 128, 32, 10000.0).angles(64))
    with Ops() as seen:
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    return [y.detach(), x.grad, *(each.grad for each in layer.parameters())], seen.count


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_rotary_positions_with_its_codes_is_the_gradient_and_then_its_codes(name, monkeypatch):
    recipe = RECIPES[name]
    got, ops = attention(recipe)
    monkeypatch.setattr(Linear, "with_grad_codes", lambda linear, x, draws, norm_input: (linear(x, draws=draws), None))
    want, alone = attention(recipe)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    folds = name in ("fp4_fold", "fp8_eden4")
    assert ops["rotary_backward_ladder"] == folds and not alone["rotary_backward_ladder"]
    assert alone["rotate_fold_ladder"] - ops["rotate_fold_ladder"] == folds


def test_attention_that_normalises_queries_and_keys_quantises_its_gradient_in_the_linear():
    assert not attention(RECIPES["fp8_eden4"], QKNorm)[1]["rotary_backward_ladder"]


def test_swiglu_with_biases_quantises_its_gradient_in_the_linear():
    """dY of the GEMM is then not what the activation computes alone: the bias needs it, too."""
    assert not swiglu(RECIPES["fp8_eden4"], bias=True)[1]["gated_silu_backward_ladder"]


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
