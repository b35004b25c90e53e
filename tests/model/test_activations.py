"""The derivatives that kept codes need, against FP64 autograd of formulas written down once more.

Bounds are derived: FP32's half step u times the sum of the magnitudes of an expression's terms, times a small count of
roundings. Centring cancels, so LayerNorm's terms are counted before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.model.activations import RMS, GatedSiLU, Normal, TanhGELU
from lowprec_train.precision.saved_activations import Formula

EPS, U, COUNT = 1e-5, 2.0**-24, 32
ROWS, WIDTH = 12, 48
Tensors = tuple[Tensor, ...]


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return x / (mean(x**2) + EPS).sqrt() * w


def normal(x: Tensor, w: Tensor, b: Tensor | float = 0.0) -> Tensor:
    centred = x - mean(x)
    return centred / (mean(centred**2) + EPS).sqrt() * w + b


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def tanh_gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def norm_terms(n: Tensor, rate: Tensor, dy: Tensor, w: Tensor, b: Tensor | float = 0.0) -> tuple[Tensor, ...]:
    """Magnitudes behind y, dx, dw, db for normalised entries of magnitude n; `rate` is as uncertain as n^2."""
    spread = 1 + mean(n**2)
    g = (dy * w).abs()
    y, dx = n * w.abs() * spread + abs(b), rate * (g + mean(g) + n * mean(g * n)) * spread
    return y, dx, ROWS * (dy.abs() * n * spread).sum(0), ROWS * dy.abs().sum(0)


def rms_terms(dy: Tensor, x: Tensor, w: Tensor) -> Tensors:
    rate = (mean(x**2) + EPS).rsqrt()
    return norm_terms(x.abs() * rate, rate, dy, w)


def normal_terms(dy: Tensor, x: Tensor, w: Tensor, b: Tensor | float = 0.0) -> Tensors:
    rate = (mean((x - mean(x)) ** 2) + EPS).rsqrt()
    return norm_terms((x.abs() + mean(x.abs())) * rate, rate, dy, w, b)


def gated_silu_terms(dy: Tensor, gate: Tensor, up: Tensor) -> Tensors:
    open = torch.sigmoid(gate)
    slope = open * (1 + gate.abs() * (1 - open))
    return (gate * open * up).abs(), (dy * up).abs() * slope, (dy * gate).abs() * open


def tanh_gelu_terms(dy: Tensor, x: Tensor) -> Tensors:
    steep = 1 - torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)) ** 2
    return x.abs(), dy.abs() * (1 + x.abs() * steep * (1 + x**2))


@dataclass(frozen=True)
class Case:
    formula: Formula
    plain: Callable[..., Tensor]  # the same in FP64
    terms: Callable[..., Tensors]  # (dy, *tensors) -> magnitudes of y and of each gradient
    inputs: int
    parameters: int
    torchs: Callable[..., Tensor]  # torch's own


CASES = {
    "rms": Case(RMS(EPS), rms, rms_terms, 1, 1, lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
    "normal": Case(Normal(EPS), normal, normal_terms, 1, 1, lambda x, w: F.layer_norm(x, w.shape, w, None, EPS)),
    "normal, bias": Case(Normal(EPS), normal, normal_terms, 1, 2, lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS)),
    "gated silu": Case(GatedSiLU(), gated_silu, gated_silu_terms, 2, 0, lambda gate, up: F.silu(gate) * up),
    "tanh gelu": Case(TanhGELU(), tanh_gelu, tanh_gelu_terms, 1, 0, lambda x: F.gelu(x, approximate="tanh")),
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def zero_rows(x: Tensor) -> Tensor:
    return x * (torch.arange(ROWS) % 3 > 0)[:, None]


def ladder(x: Tensor) -> Tensor:
    """Rows of magnitude 10^-30 to 10^15: squares that vanish beside eps, squares near FP32's end."""
    return x * torch.logspace(-30, 15, ROWS)[:, None]


DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "unit": lambda x: x,
    "large": lambda x: 1e4 * x,
    "tiny": lambda x: 1e-6 * x,
    "zero rows": zero_rows,
    "offset": lambda x: x + 20.0,
    "equal": lambda x: x[:, :1].expand_as(x).contiguous(),
    "ladder": ladder,
}


def tensors(case: Case, data: str) -> tuple[Tensors, Tensors, Tensor]:
    """Inputs, parameters and dy, FP32."""
    inputs = tuple(DATA[data](randn(ROWS, WIDTH, seed=i)) for i in range(case.inputs))
    parameters = tuple(1 + 0.3 * randn(WIDTH, seed=10 + i) for i in range(case.parameters))
    return inputs, parameters, randn(ROWS, WIDTH, seed=20)


def exact(plain: Callable[..., Tensor], values: Tensors, dy: Tensor) -> Tensors:
    """y and the gradients, by FP64 autograd."""
    leaves = tuple(v.double().requires_grad_() for v in values)
    y = plain(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", CASES)
def test_value_and_derivative_are_those_of_the_formula(name: str, data: str) -> None:
    case = CASES[name]
    inputs, parameters, dy = tensors(case, data)
    found = case.formula.forward(inputs, parameters), *case.formula.backward(dy, inputs, parameters)
    expected = exact(case.plain, (*inputs, *parameters), dy)
    terms = case.terms(*(t.double() for t in (dy, *inputs, *parameters)))
    assert len(found) == len(expected) == 1 + case.inputs + case.parameters
    for ours, theirs, magnitude in zip(found, expected, terms):
        assert ours.dtype is torch.float32 and ours.shape == theirs.shape
        error = (ours.double() - theirs).abs()
        assert (error <= COUNT * U * magnitude + 1e-36).all(), (error / (U * magnitude + 1e-44)).max()


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_torchs(name: str) -> None:
    case = CASES[name]
    inputs, parameters, dy = tensors(case, "unit")
    ours, theirs = (exact(function, (*inputs, *parameters), dy) for function in (case.plain, case.torchs))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_tokens_may_have_any_leading_shape(name: str) -> None:
    """Parameters' gradients are sums over all tokens, the others the same numbers in another shape."""
    case = CASES[name]
    inputs, parameters, dy = tensors(case, "unit")
    flat = case.formula.backward(dy, inputs, parameters)
    shape = (2, ROWS // 2, WIDTH)
    cut = case.formula.backward(dy.view(shape), tuple(x.view(shape) for x in inputs), parameters)
    for a, b in zip(flat, cut):
        assert torch.equal(a, b.view(a.shape))


@pytest.mark.parametrize("gate", [-200.0, -90.0, 90.0, 200.0])
def test_a_shut_gate_passes_zero_and_an_open_one_everything(gate: float) -> None:
    """Where exp over- or underflows in FP32: 0 or 1 and never a NaN."""
    one = torch.ones(1, 1)
    dgate, dup = GatedSiLU().backward(one, (gate * one, one), ())
    dx, *_ = TanhGELU().backward(one, (gate * one,), ())
    for value, expected in ((dgate, gate > 0), (dup, gate * (gate > 0)), (dx, gate > 0)):
        assert value.item() == pytest.approx(float(expected), abs=1e-36)
