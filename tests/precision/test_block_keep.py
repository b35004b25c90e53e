"""A layer whose input is kept in codes: y = f(x^) forward, f'(x^) dy backward, for any f, format and scale rule."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from lowprec_train.numerics.formats import parse_format
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.precision.block_keep import BlockKeep, KeptInput, apply_block_keep, kept_inputs

TOKENS, WIDTH = 6, 64
E4M3 = parse_format("E4M3")
COAT = Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2)
HOWS = {
    "coat": COAT,
    "groups of 32": Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.POW2),
    "one a token": Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2),
    "FP32 scales": Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.FP32),
    "E5M2": Quantizer(parse_format("E5M2"), tile=(1, 16), scale=ScaleRule.E8M0_CEIL),
    "E8M0 floor": Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.E8M0_FLOOR),
    "E8M0 floor with head-room": Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.E8M0_FLOOR, headroom=3 / 4),
    "INT8": Quantizer(parse_format("INT8"), tile=(1, 16), scale=ScaleRule.FP32),
    "MXFP4": Quantizer(parse_format("E2M1"), tile=(1, 32), scale=ScaleRule.POW2, span=14),
    "NVFP4": Quantizer(parse_format("E2M1"), tile=(1, 16), scale=ScaleRule.NVFP4),
    "BF16": Quantizer(parse_format("BF16"), tile=(1, 16)),
}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Product:
    """y = a b w. The reference takes the same products in the same order, so equal means equal."""

    def forward(self, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * inputs[1] * parameters[0]

    def backward(self, dy: Tensor, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        a, b = inputs
        return dy * b * parameters[0], dy * a * parameters[0], (dy * a * b).flatten(end_dim=-2).sum(0)


class Pair(KeptInput):
    role = "activation"

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(2.0 ** (torch.arange(width) % 5 - 2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.through_codes(Product(), (a, b), (self.weight,))


class Norm(KeptInput):
    role = "norm"

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Tokens of magnitudes 2^-20 to 2^20, one of them zero; an outlier in the first group of each."""
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = x * 2.0 ** torch.linspace(-20, 20, shape[-1])[:, None].round()
    x[..., 0] *= 300
    x[..., 1, :] = 0
    return x.to(dtype)


def layer(how: Quantizer) -> Pair:
    pair = Pair()
    pair.quantizer = how
    return pair


def rounded(x: Tensor, how: Quantizer) -> Tensor:
    return how(x.flatten(end_dim=-2)).dequantize().view(x.shape)


@pytest.mark.parametrize("shape", [(TOKENS,), (2, TOKENS)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HOWS)
def test_the_value_and_the_gradient_are_those_at_the_rounded_input(name: str, dtype: torch.dtype, shape: tuple) -> None:
    """Both passes see one x^, whatever form the scale is kept in; the rounding itself passes gradients unchanged."""
    how, pair = HOWS[name], layer(HOWS[name])
    a, b = (values(dtype, *shape, seed=i).requires_grad_() for i in range(2))
    dy = torch.randn(a.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = pair(a, b)
    y.backward(dy)
    a_, b_, w = rounded(a.detach(), how), rounded(b.detach(), how), pair.weight.detach()
    da, db, dw = Product().backward(dy.float(), (a_, b_), (w,))
    assert y.dtype is a.grad.dtype is b.grad.dtype is dtype and pair.weight.grad.dtype is torch.float32
    assert torch.equal(y, (a_ * b_ * w).to(dtype))
    assert torch.equal(a.grad, da.to(dtype)) and torch.equal(b.grad, db.to(dtype))
    assert torch.equal(pair.weight.grad, dw)


def stored(pair: Pair, a: Tensor, b: Tensor) -> list[Tensor]:
    """What autograd saved, but for parameters."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        pair(a, b)
    return [t for t in found if t is not pair.weight]


@pytest.mark.parametrize("name", HOWS)
def test_codes_and_scales_are_all_that_is_kept(name: str) -> None:
    """A scale that is a power of two is one byte, its biased exponent; any other is FP32."""
    how = HOWS[name]
    a, b = (values(torch.bfloat16, TOKENS, seed=i).requires_grad_() for i in range(2))
    tensors = stored(layer(how), a, b)
    expected = [how(each) for each in (a.detach(), b.detach())]
    assert len(tensors) == 4
    for codes, scale, want in zip(tensors[::2], tensors[1::2], expected):
        assert codes.dtype == want.codes.dtype and torch.equal(codes.float(), want.codes.float())
        if name in ("FP32 scales", "E8M0 floor with head-room", "INT8", "NVFP4", "BF16"):
            assert torch.equal(scale, want.scale)
        else:
            assert scale.dtype is torch.uint8 and torch.equal(2.0 ** (scale.double() - 127), want.scale.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["coat", "FP32 scales", "INT8"])
def test_what_is_not_finite_stays_visible(name: str, bad: float, dtype: torch.dtype) -> None:
    """In its group, forward and backward, and nowhere else."""
    a = values(dtype, TOKENS)
    a[3, 20] = bad
    a.requires_grad_()
    b = torch.ones_like(a).detach().requires_grad_()
    y = layer(HOWS[name])(a, b)
    y.backward(torch.ones_like(y))
    for tensor in (y, b.grad):
        broken = ~tensor.isfinite()
        assert broken[3, 20] and not broken[:, :16].any() and not broken[:, 32:].any() and broken.any(1).sum() == 1


def test_the_observer_is_told_of_every_rounding() -> None:
    pair, events = layer(COAT), list[tuple[Tensor, Quantized, Quantizer]]()
    a, b = (values(torch.bfloat16, 2, TOKENS, seed=i).requires_grad_() for i in range(2))
    alone = pair(a, b)
    pair.observer = lambda *event: events.append(event)
    watched = pair(a, b)
    watched.sum().backward()
    assert torch.equal(watched, alone)
    assert len(events) == 2  # backward makes no codes
    for x, (matrix, codes, how) in zip((a, b), events):
        assert how is COAT and torch.equal(matrix, x.flatten(end_dim=-2))
        assert torch.equal(codes.dequantize(), COAT(matrix).dequantize())


# --- the policy ---


def test_rounding_is_to_nearest_within_a_token() -> None:
    drawn = Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2, stochastic=True)
    for refused in (drawn, Quantizer(E4M3), Quantizer(E4M3, tile=(16, 16)), Quantizer(E4M3, tile=(-1, 1))):
        for role in ("norm", "activation"):
            with pytest.raises(ValueError, match=f"{role}=E4M3.*to nearest in groups of one token"):
                BlockKeep(**{role: refused})


class Model(nn.Module):
    """A norm outside of blocks, and a block of one width, one of another."""

    def __init__(self, first: int = 64, second: int = 72) -> None:
        super().__init__()
        self.norm = Norm(40)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": Norm(w), "mlp": nn.Sequential(nn.Identity(), Pair(w))}) for w in (first, second)
        )


NAMES = ["blocks.0.norm", "blocks.0.mlp.1", "blocks.1.norm", "blocks.1.mlp.1"]


def test_only_blocks_are_kept_in_codes() -> None:
    assert [name for name, _ in kept_inputs(Model())] == NAMES


@pytest.mark.parametrize("role, name", [("norm", "blocks.1.norm"), ("activation", "blocks.1.mlp.1")])
def test_a_width_that_groups_do_not_divide_is_named(role: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: groups of 16 do not divide the 72 channels"):
        BlockKeep(**{role: COAT}).check(Model())
    BlockKeep(**{role: HOWS["one a token"]}).check(Model())
    BlockKeep(**{role: COAT}).check(Model(second=48))  # the norm outside of blocks has 40
    BlockKeep().check(Model())


def test_a_policy_is_set_by_role_and_taken_back() -> None:
    model, other = Model(), HOWS["one a token"]
    assert {module.quantizer for _, module in kept_inputs(model)} == {None}
    for keep in (BlockKeep(norm=COAT, activation=other), BlockKeep(activation=COAT), BlockKeep()):
        apply_block_keep(model, keep)
        assert [module.quantizer for _, module in kept_inputs(model)] == [keep.norm, keep.activation] * 2
        assert model.norm.quantizer is None
