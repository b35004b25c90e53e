"""A layer whose input is kept in codes: y = f(x^) forward, f'(x^) dy backward, for any f, format and scale rule."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from lowprec_train.numerics.formats import E2M1, E4M3, STOCHASTIC, parse_format
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.precision.saved_activations import (
    QuantizedSavedInput,
    SavedActivationPolicy,
    apply_saved_activations,
    saved_inputs,
)

TOKENS, WIDTH = 6, 64
COAT = Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2)
HOWS = {
    "coat": COAT,
    "groups of 32": Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.POW2),
    "one a token": Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2),
    "E5M2": Quantizer(parse_format("E5M2"), tile=(1, 16), scale=ScaleRule.E8M0_CEIL),
    "INT8": Quantizer(parse_format("INT8"), tile=(1, 16), scale=ScaleRule.POW2),
    "E2M1": Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.POW2),
    "E2M1, bounded span": Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL, exponent_span=14),
    "BF16": Quantizer(parse_format("BF16"), tile=(1, 16), scale=ScaleRule.POW2),
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


class Pair(QuantizedSavedInput):
    role = "activation"

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(2.0 ** (torch.arange(width) % 5 - 2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.through_codes(Product(), (a, b), (self.weight,))


class Norm(QuantizedSavedInput):
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
    """A group's scale is one byte, its biased exponent; two E2M1 codes are one byte."""
    how = HOWS[name]
    a, b = (values(torch.bfloat16, TOKENS, seed=i).requires_grad_() for i in range(2))
    tensors = stored(layer(how), a, b)
    assert len(tensors) == 4
    for codes, scale, x in zip(tensors[::2], tensors[1::2], (a.detach(), b.detach())):
        want = how(x)
        if how.format is E2M1:
            assert codes.dtype is torch.uint8 and codes.shape == (TOKENS, WIDTH // 2)
            codes = torch.ops.lowprec.unpack_e2m1(codes)
        assert codes.dtype == want.codes.dtype and torch.equal(codes.float(), want.codes.float())
        assert scale.dtype is torch.uint8 and torch.equal(2.0 ** (scale.double() - 127), want.scale.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["coat", "INT8", "E2M1, bounded span"])
def test_what_is_not_finite_stays_visible(name: str, bad: float, dtype: torch.dtype) -> None:
    """In its group, forward and backward, and nowhere else."""
    how, a = HOWS[name], values(dtype, TOKENS)
    first = 20 // how.tile[1] * how.tile[1]
    a[3, 20] = bad
    a.requires_grad_()
    b = torch.ones_like(a).detach().requires_grad_()
    y = layer(how)(a, b)
    y.backward(torch.ones_like(y))
    for tensor in (y, b.grad):
        broken = ~tensor.isfinite()
        assert broken[3, 20] and broken.any(1).sum() == 1
        broken[:, first : first + how.tile[1]] = False
        assert how.exponent_span or not broken.any()  # a span's floor comes from the whole row


def test_the_observer_is_called_for_every_rounding() -> None:
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


@pytest.mark.parametrize("name", ["coat", "E2M1"])
def test_evaluation_computes_and_reports_the_same(name: str) -> None:
    pair, events = layer(HOWS[name]), []
    pair.observer = lambda *event: events.append(event)
    a, b = (values(torch.bfloat16, TOKENS, seed=i).requires_grad_() for i in range(2))
    trained = pair(a, b)
    with torch.no_grad():
        evaluated = pair(a, b)
    assert torch.equal(trained, evaluated) and not evaluated.requires_grad
    assert len(events) == 4 and all(torch.equal(events[i][0], events[i + 2][0]) for i in range(2))


# --- the policy ---


def test_rounding_is_to_nearest_within_a_token() -> None:
    drawn = Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2, rounding=STOCHASTIC)
    for refused in (drawn, Quantizer(E4M3), Quantizer(E4M3, tile=(16, 16)), Quantizer(E4M3, tile=(-1, 1))):
        for role in ("norm", "activation"):
            with pytest.raises(ValueError, match=f"{role}=E4M3.*to nearest in groups of one token"):
                SavedActivationPolicy(**{role: refused})


@pytest.mark.parametrize("rule", [ScaleRule.FP32, ScaleRule.E8M0_FLOOR])
@pytest.mark.parametrize("role", ["norm", "activation"])
def test_scales_are_exponents(role: str, rule: ScaleRule) -> None:
    """FP32 ones do not fit a byte; floor's may saturate, and have a factor of 4/3 with head-room."""
    with pytest.raises(ValueError, match=f"{role}=E4M3.*{rule.name}.*POW2 or E8M0_CEIL"):
        SavedActivationPolicy(**{role: Quantizer(E4M3, tile=(1, 16), scale=rule)})


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
    assert [name for name, _ in saved_inputs(Model())] == NAMES


@pytest.mark.parametrize("role, name", [("norm", "blocks.1.norm"), ("activation", "blocks.1.mlp.1")])
def test_a_width_that_groups_do_not_divide_is_named(role: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: groups of 16 do not divide the 72 channels"):
        SavedActivationPolicy(**{role: COAT}).check(Model())
    SavedActivationPolicy(**{role: HOWS["one a token"]}).check(Model())
    SavedActivationPolicy(**{role: COAT}).check(Model(second=48))  # the norm outside of blocks has 40
    SavedActivationPolicy().check(Model())


def test_e2m1_codes_come_in_pairs() -> None:
    with pytest.raises(ValueError, match=r"blocks.1.norm: two E2M1 codes make a byte, and it keeps 63 channels"):
        SavedActivationPolicy(norm=Quantizer(E2M1, tile=(1, -1), scale=ScaleRule.POW2)).check(Model(second=63))


def test_a_policy_is_set_by_role_and_taken_back() -> None:
    model, other = Model(), HOWS["one a token"]
    assert {module.quantizer for _, module in saved_inputs(model)} == {None}
    for keep in (
        SavedActivationPolicy(norm=COAT, activation=other),
        SavedActivationPolicy(activation=COAT),
        SavedActivationPolicy(),
    ):
        apply_saved_activations(model, keep)
        assert [module.quantizer for _, module in saved_inputs(model)] == [keep.norm, keep.activation] * 2
        assert model.norm.quantizer is None
