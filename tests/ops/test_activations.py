"""Ops that round their input, compute and save its codes: the numbers of rounding, computing and saving one by one, as
values, as gradients, in a compiled graph and in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowprec_train.model.activations import (
    RMS,
    GatedSiLU,
    Normal,
    TanhGELU,
    quantized_gated_silu,
    quantized_gelu,
    quantized_norm,
)
from lowprec_train.model.joint_graph import partitioned
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, Format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import activations
from lowprec_train.precision import saved_activations
from lowprec_train.precision.saved_activations import QuantizedSavedInput
from tests.recipes import MODELS, system

ops = torch.ops.lowprec
ROWS, WIDTH, EPS = 12, 96, 1e-5
HOWS = {
    "coat": Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2),
    "E5M2": Quantizer(E5M2, tile=(1, 32), scale=ScaleRule.E8M0_CEIL),
    "E2M1": Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.POW2),
}
DTYPES = (torch.float32, torch.bfloat16)
FUSED = frozenset({"quantized_norm", "quantized_gated_silu", "quantized_gelu"})


class Layer(QuantizedSavedInput):
    """Any formula, op by op."""

    role, op, width = "norm", "quantized_norm", WIDTH


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens of magnitudes 2^-12 to 2^12, one of them zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) > 1:
        x = x * 2.0 ** torch.linspace(-12, 12, shape[-2])[:, None].round()
        x[..., 1, :] = 0
    return x.to(dtype)


def parameters(bias: bool) -> tuple[Tensor, ...]:
    return tuple((1 + 0.3 * randn(WIDTH, seed=10 + i)).requires_grad_() for i in range(2 if bias else 1))


def step_by_step(formula: Any, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...], how: Quantizer) -> Tensor:
    layer = Layer()
    layer.quantizer = how
    return layer.through_codes(formula, inputs, weights)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


Both = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]  # one op, step by step
CASES: dict[str, tuple[int, int, Both]] = {  # columns of the input, parameters
    "rms": (
        1,
        1,
        (
            lambda x, how, w: quantized_norm(x, w, None, EPS, False, how),
            lambda x, how, w: step_by_step(RMS(EPS), (x,), (w,), how),
        ),
    ),
    "layer norm": (
        1,
        1,
        (
            lambda x, how, w: quantized_norm(x, w, None, EPS, True, how),
            lambda x, how, w: step_by_step(Normal(EPS), (x,), (w,), how),
        ),
    ),
    "layer norm, bias": (
        1,
        2,
        (
            lambda x, how, w, b: quantized_norm(x, w, b, EPS, True, how),
            lambda x, how, w, b: step_by_step(Normal(EPS), (x,), (w, b), how),
        ),
    ),
    "gated": (
        2,
        0,
        (
            lambda x, how: quantized_gated_silu(x, None, how),
            lambda x, how: step_by_step(GatedSiLU(), pair(x), (), how),
        ),
    ),
    "gelu": (
        1,
        0,
        (
            lambda x, how: quantized_gelu(x, None, how),
            lambda x, how: step_by_step(TanhGELU(), (x,), (), how),
        ),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_one_op_has_the_bits_of_many(case: str, name: str, dtype: torch.dtype) -> None:
    times, count, (fused, plain) = CASES[case]
    results = []
    for function in (fused, plain):
        x = randn(2, ROWS, times * WIDTH, seed=1, dtype=dtype).requires_grad_()
        weights = parameters(count == 2)[:count]
        y = function(x, HOWS[name], *weights)
        if function is fused:
            y, amax = y
            assert torch.equal(amax, y.float().abs().amax(-1).flatten()) and not amax.requires_grad
            with torch.no_grad():
                again, _ = function(x, HOWS[name], *weights)
            assert torch.equal(again, y) and not again.requires_grad
        y.backward(randn(2, ROWS, WIDTH, seed=2, dtype=dtype))
        results.append([y, x.grad, *(w.grad for w in weights)])
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_compiled_has_the_bits_of_eager(case: str) -> None:
    times, count, (fused, _) = CASES[case]
    torch._dynamo.reset()
    results = []
    for function in (fused, torch.compile(fused, fullgraph=True, backend="aot_eager")):
        x = randn(ROWS, times * WIDTH, seed=1, dtype=torch.bfloat16).requires_grad_()
        weights = parameters(count == 2)[:count]
        y, amax = function(x * 1, HOWS["coat"], *weights)
        (y.float() * 1.5).sum().backward()
        results.append([y, amax, x.grad, *(w.grad for w in weights)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.any()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", HOWS)
def test_what_is_saved_is_what_the_quantizer_makes(name: str) -> None:
    how = HOWS[name]
    format, group = how.format.name, how.tile[1]
    x = randn(ROWS, 2 * WIDTH, seed=3, dtype=torch.bfloat16)
    gate, up = (part.contiguous() for part in pair(x))
    _, _, *saved = ops.quantized_gated_silu(x, format, group)
    for part, codes, exponents in ((gate, *saved[:2]), (up, *saved[2:])):
        wanted = how(part)
        assert codes.dtype is (torch.uint8 if how.format is E2M1 else wanted.codes.dtype)
        codes = ops.unpack_e2m1(codes) if how.format is E2M1 else codes
        assert torch.equal(codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert exponents.dtype is torch.uint8 and torch.equal(2.0 ** (exponents.double() - 127), wanted.scale.double())
        for other in (
            ops.quantized_gelu(part, format, group),
            ops.quantized_norm(part, torch.ones(WIDTH), None, EPS, True, format, group),
        ):
            assert torch.equal(other[3], exponents)


def test_the_amax_of_the_gradient_comes_back() -> None:
    for function, times in ((quantized_gated_silu, 2), (quantized_gelu, 1)):
        x = randn(2, ROWS, times * WIDTH, seed=1, dtype=torch.bfloat16).requires_grad_()
        grad_amax = torch.zeros(2 * ROWS, requires_grad=True)
        y, _ = function(x, grad_amax, HOWS["coat"])
        y.backward(randn(2, ROWS, WIDTH, seed=2, dtype=torch.bfloat16))
        assert torch.equal(grad_amax.grad, x.grad.float().abs().amax(-1).flatten())


@pytest.mark.parametrize("format", ["E4M3", "E2M1"])
@pytest.mark.parametrize("biased", [False, True])
def test_shapes_are_those_that_the_schema_says(format: str, biased: bool) -> None:
    checks = ("test_faketensor",)  # torch's test of aliasing multiplies, which FP8 does not
    x, weight = randn(4, 2 * WIDTH, seed=1, dtype=torch.bfloat16), torch.ones(2 * WIDTH)
    bias = torch.ones(2 * WIDTH) if biased else None
    arguments = (x, weight, bias, EPS, True, format, 32)
    torch.library.opcheck(ops.quantized_norm.default, arguments, test_utils=checks)
    saved = ops.quantized_norm(*arguments)[2:]
    torch.library.opcheck(
        ops.quantized_norm_backward.default, (x, *saved, weight, biased, *arguments[3:]), test_utils=checks
    )
    torch.library.opcheck(ops.quantized_gelu.default, (x, format, 32), test_utils=checks)
    torch.library.opcheck(ops.quantized_gelu_backward.default, (x, *saved, format, 32), test_utils=checks)
    torch.library.opcheck(ops.quantized_gated_silu.default, (x, format, 32), test_utils=checks)
    dy, saved = x[:, :WIDTH].contiguous(), ops.quantized_gated_silu(x, format, 32)[2:]
    torch.library.opcheck(ops.quantized_gated_silu_backward.default, (dy, *saved, format, 32), test_utils=checks)

    codes, exponents = ops.group_codes(x, format, 32, 2)
    torch.library.opcheck(ops.group_codes.default, (x, format, 32, 2), test_utils=checks)
    arguments = (codes, exponents, torch.ones(WIDTH), None, EPS, True, format, 32, torch.bfloat16)
    torch.library.opcheck(ops.norm_of_codes.default, arguments, test_utils=checks)
    for op in (ops.gated_silu_of_codes, ops.gelu_of_codes):
        torch.library.opcheck(op.default, (codes, exponents, format, 32, torch.bfloat16), test_utils=checks)


# --- codes by an op of their own ---


def odd(dtype: torch.dtype) -> Tensor:
    """Rows [9, 256]: zeros, one value, the largest and the smallest numbers, values just above a power of two, every
    magnitude at once, Inf, NaN.
    """
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    x[1], x[2] = 0, 0
    x[2, 7] = -3.0
    x[3] *= 2.0**127 / x[3].abs().max()
    x[4] *= 2.0**-130
    x[5] = (1 + x[5].abs() * 2**-7) * 2.0 ** torch.arange(-64, 64).repeat(2)
    x[6] = x[6].sign() * 2.0 ** torch.linspace(-126, 120, 256).round()
    x[7, 40], x[8, 40] = torch.inf, torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", [E4M3, E5M2, E2M1], ids=str)
def test_rounded_values_round_to_themselves(kind: Format, group: int, dtype: torch.dtype) -> None:
    """Q(Q(x)) = Q(x). Codes may differ: twice the code, half the scale."""
    x, how = odd(dtype), Quantizer(kind, tile=(1, group), scale=ScaleRule.POW2)
    expected = how(x).dequantize()
    values = activations.dequantized(*saved_activations.saved_codes(x, how), kind.name)
    assert torch.equal(values.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))
    assert torch.equal(values.to(dtype).float().nan_to_num(7.0), values.nan_to_num(7.0))
    again = how(values.to(dtype)).dequantize()
    assert torch.equal(again.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("op", ["norm", "gated", "gelu"])
def test_y_of_saved_codes_is_that_of_one_op(op: str, name: str, dtype: torch.dtype) -> None:
    weights, how, results = parameters(True), HOWS[name], []
    for recomputes in (False, True):
        x = randn(2, ROWS, (2 if op == "gated" else 1) * WIDTH, seed=1, dtype=dtype).requires_grad_()
        grad_amax = torch.zeros(2 * ROWS, requires_grad=True)
        if op == "norm":
            y, amax = quantized_norm(x, *weights, EPS, True, how, recomputes)
        else:
            y, amax = (quantized_gated_silu if op == "gated" else quantized_gelu)(x, grad_amax, how, recomputes)
        y.backward(randn(2, ROWS, WIDTH, seed=2, dtype=dtype))
        results.append([y, amax, x.grad, grad_amax.grad if op != "norm" else weights[0].grad.clone()])
        weights[0].grad = None
    assert all(torch.equal(*each) for each in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["E4M3", "E5M2", "E2M1"])
def test_two_passes_have_the_bits_of_one(format: str, dtype: torch.dtype) -> None:
    """Codes, exponents, y and amax of odd numbers; also of columns in turn of two matrices."""
    x, how = odd(dtype), (format, 32)
    norm = (torch.linspace(0.5, 2, 256), None, EPS, False)
    codes = ops.group_codes(x, *how, 1)
    for two, one in (
        (ops.norm_of_codes(*codes, *norm, *how, dtype), ops.quantized_norm(x, *norm, *how)),
        (ops.gelu_of_codes(*codes, *how, dtype), ops.quantized_gelu(x, *how)),
    ):
        for a, b in zip((*two, *codes), one, strict=True):
            assert a.dtype is b.dtype and torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))
    codes = ops.group_codes(x, *how, 2)
    y, amax, *parts = ops.quantized_gated_silu(x, *how)
    found = (*ops.gated_silu_of_codes(*codes, *how, dtype), *codes)
    for a, b in zip(found, (y, amax, torch.cat(parts[::2]), torch.cat(parts[1::2])), strict=True):
        assert a.dtype is b.dtype and torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))


# --- which form a layer takes ---


def fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saved_activations.SERVED, "cpu", FUSED)


def test_kernels_take_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(), torch.ones(2, WIDTH).bfloat16()
    layer.quantizer = HOWS["coat"]
    monkeypatch.setitem(saved_activations.SERVED, "cpu", frozenset())
    assert not layer.fuses(x)
    fused_on_the_cpu(monkeypatch)
    assert layer.fuses(x) and layer.fuses(x.float()) and not layer.fuses(x.half())
    layer.observer = lambda *event: None
    assert not layer.fuses(x)
    layer.observer = None
    line = {"scale": ScaleRule.POW2}
    spanned = Quantizer(E2M1, tile=(1, 16), exponent_span=14, **line)
    for how in (
        None,
        spanned,
        Quantizer(E4M3, tile=(1, -1), **line),
        Quantizer(E4M3, tile=(1, 16), headroom=0.5, **line),
    ):
        layer.quantizer = how
        assert not layer.fuses(x)
    assert not activations.has_kernel("quantized_norm", 32768, "E4M3", 16) and activations.has_kernel(
        "quantized_gelu", 32768, "E4M3", 16
    )
    assert not activations.has_kernel("quantized_gelu", 88, "E4M3", 16) and not activations.has_kernel(
        "quantized_gelu", 96, "INT8", 16
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_fused_layers_is_the_model(model: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for fused in (False, True):
        if fused:
            fused_on_the_cpu(monkeypatch)
        one = system("coat", model, f"model.recompute={recompute}")
        tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
        loss = one.model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=one.seeds.at(0, 0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in one.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_compiled_blocks_save_what_group_codes_makes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under selective recomputation. Losses are those of eager blocks; gradients differ by BF16's last bits where the
    compiler decomposes a norm.
    """
    fused_on_the_cpu(monkeypatch)
    results, kept = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        one = system("coat", model, "model.recompute=selective")
        if compiled:
            one.model.compile_blocks(backend=partitioned, dynamic=False)
        tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(2))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = one.model.loss(tokens, tokens.roll(-1, 1), float(tokens.numel()), draws=one.seeds.at(0, 0))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in one.model.parameters())])
    torch._dynamo.reset()
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 4e-3 * a.norm()
    width = one.model.blocks[0].mlp.width
    ways = 2 if "llama" in model else 1
    saved = [t for t in kept if t.dtype is torch.float8_e4m3fn and t.shape[-1] == width]
    assert any(t.shape[0] == ways * tokens.numel() for t in saved)
