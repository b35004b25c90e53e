"""CUDA kernels of norms and activations that keep codes: codes and exponents are the quantiser's bits, values and
gradients lie within FP32's roundings of FP64 on the same rounded inputs, and are rounded once to the stream's dtype.

Bounds: FP32's half step U times the sum of the magnitudes of an expression's terms, times a count of roundings on the
way (a row's sum is at most 32 products a thread and a tree; exp's argument costs its own magnitude).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowprec_train.model.layers import GELU, LayerNorm, RMSNorm, SwiGLU
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.library import SERVED

pytestmark = pytest.mark.gpu
ops = torch.ops.lowprec
EPS, U, COUNT = 1e-5, 2.0**-24, 64
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float32: 0.0}
FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}
GROUPS = [(format, group) for format in FORMATS for group in (16, 32)] + [("E4M3", 128), ("E4M3", 256)]
SHAPES = [(1, 256), (7, 768), (300, 4096), (33, 5120), (5, 8192), (3, 16384)]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def built():
    missing = {"quantized_norm", "quantized_norm_backward", "quantized_gated_silu", "quantized_gelu"} - SERVED["cuda"]
    if missing:
        pytest.skip(f"no CUDA kernel was built for {sorted(missing)}")


def data(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Tokens of magnitudes 2^-20 to 2^4, one zero, zeros and an outlier in the first group."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.linspace(4, -20 if rows > 3 else 0, rows).round())[:, None]
    x[:, 5] *= 30
    x[:, 16:32] = 0
    if rows > 4:
        x[3] = 0
    return x.to(dtype).cuda()


def quantizer(format: str, group: int) -> Quantizer:
    return Quantizer(FORMATS[format], tile=(1, group), scale=ScaleRule.POW2)


def check_kept(x: Tensor, codes: Tensor, exponents: Tensor, how: Quantizer) -> Tensor:
    """Asserts the bits of what is kept of x; returns what it stands for, FP64."""
    for device in ("cpu", "cuda"):
        wanted = how(x.to(device).contiguous())
        stored = ops.pack_e2m1(wanted.codes) if how.format is E2M1 else wanted.codes
        biased = (wanted.scale.view(torch.int32) >> 23).to(torch.uint8)
        assert codes.dtype is stored.dtype and codes.shape == stored.shape and codes.is_contiguous()
        assert torch.equal(codes.view(torch.uint8).cpu(), stored.view(torch.uint8).cpu())
        assert torch.equal(exponents.cpu(), biased.cpu())
    return wanted.dequantize().double()


def check(
    found: Tensor, exact: Tensor, terms: Tensor, count: Tensor | float = COUNT, times: Tensor | float = 1.0
) -> None:
    """|error| <= count U terms, and half a step of the dtype. times: what a sigmoid below FP32's normal numbers, which
    the device takes for zero, is multiplied by.
    """
    error = (found.double() - exact).abs()
    bound = (
        count * U * terms
        + HALF_STEP.get(found.dtype, 0.0) * (exact.abs() + count * U * terms)
        + 1e-36
        + 2.0**-126 * times
    )
    assert (error <= bound).all(), (error / bound).max()


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


# --- norms ---


def norm_parts(x: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n, rate, magnitudes behind n, how uncertain a squared row is), FP64."""
    around = mean(x) if centered else torch.zeros_like(x[:, :1])
    rate = (mean((x - around) ** 2) + EPS).rsqrt()
    size = (x.abs() + mean(x.abs()) * centered) * rate
    return (x - around) * rate, rate, size, 1 + mean(size**2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centered, biased", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format, group", GROUPS)
def test_norm(
    format: str, group: int, shape: tuple[int, int], centered: bool, biased: bool, dtype: torch.dtype
) -> None:
    rows, columns = shape
    x, dy = data(rows, columns, dtype), data(rows, columns, dtype, seed=1)
    weight = 1 + 0.3 * data(1, columns, torch.float32, seed=2)[0]
    bias = data(1, columns, torch.float32, seed=3)[0] if biased else None
    y, amax, codes, exponents = ops.quantized_norm(x, weight, bias, EPS, centered, format, group)
    values = check_kept(x, codes, exponents, quantizer(format, group))
    n, rate, size, spread = (part.cuda() for part in norm_parts(values, centered))
    w, b = weight.double(), 0.0 if bias is None else bias.double()
    assert y.dtype is dtype and torch.equal(amax, y.float().abs().amax(1))
    check(y, n * w + b, size * w.abs() * spread + (0.0 if bias is None else b.abs()))

    arguments = (dy, codes, exponents, weight, biased, EPS, centered, format, group)
    dx, dweight, dbias = ops.quantized_norm_backward(*arguments)
    d, g = dy.double(), dy.double() * w
    inner = g - mean(g) if centered else g
    terms = rate * (g.abs() + mean(g.abs()) * centered + size * mean(g.abs() * size)) * spread
    check(dx, rate * (inner - n * mean(g * n)), terms)
    check(dweight, (d * n).sum(0), (d.abs() * size * spread).sum(0), COUNT + rows)
    assert dx.dtype is dtype and dweight.dtype is dbias.dtype is torch.float32 and dbias.numel() == columns * biased
    if biased:
        check(dbias, d.sum(0), d.abs().sum(0), COUNT + rows)
    for a, b in zip(ops.quantized_norm_backward(*arguments), (dx, dweight, dbias), strict=True):
        assert torch.equal(a, b)


def test_more_rows_than_blocks() -> None:
    """Blocks of the backward pass go over several rows, the last ones over fewer."""
    x, dy, weight = data(3001, 512, torch.bfloat16), data(3001, 512, torch.bfloat16, seed=1), torch.ones(512).cuda()
    _, _, *kept = ops.quantized_norm(x, weight, None, EPS, False, "E4M3", 16)
    dx, dweight, _ = ops.quantized_norm_backward(dy, *kept, weight, False, EPS, False, "E4M3", 16)
    part = ops.quantized_norm_backward(
        dy[1500:], *(each[1500:] for each in kept), weight, False, EPS, False, "E4M3", 16
    )
    assert torch.equal(dx[1500:], part[0])
    n, _, size, spread = norm_parts(quantizer("E4M3", 16)(x).dequantize().double(), False)
    check(dweight, (dy.double() * n).sum(0), (dy.double().abs() * size * spread).sum(0), COUNT + 3001)


# --- activations ---


def sigmoid_count(z: Tensor) -> Tensor:
    """Roundings of a sigmoid: its argument is off by its own size; beyond 100 nothing is left to be wrong."""
    return COUNT + 2 * z.abs().clamp_max(100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (17, 11008)], ids=str)
@pytest.mark.parametrize("format, group", GROUPS)
def test_gated(format: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    x, dy = data(rows, 2 * columns, dtype), data(rows, columns, dtype, seed=1)
    how = quantizer(format, group)
    y, amax, *kept = ops.quantized_gated_silu(x, format, group)
    gate, up = (part.contiguous() for part in x.unflatten(1, (-1, 2)).unbind(2))
    gate, up = (check_kept(part, *kept[2 * i : 2 * i + 2], how).cuda() for i, part in enumerate((gate, up)))
    open, shut, count = torch.sigmoid(gate), torch.sigmoid(-gate), sigmoid_count(gate)
    exact = gate * open * up
    assert y.dtype is dtype and torch.equal(amax, y.float().abs().amax(1))
    check(y, exact, exact.abs(), count, (gate * up).abs())
    dx, amax = ops.quantized_gated_silu_backward(dy, *kept, format, group)
    assert dx.dtype is dtype and torch.equal(amax, dx.float().abs().amax(1))
    (dgate, dup), d = dx.unflatten(1, (-1, 2)).unbind(2), dy.double()
    check(
        dgate,
        d * up * open * (1 + gate * shut),
        (d * up).abs() * open * (1 + gate.abs() * shut),
        count,
        (d * up * (1 + gate.abs())).abs(),
    )
    check(dup, d * gate * open, (d * gate).abs() * open, count, (d * gate).abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (17, 11008)], ids=str)
@pytest.mark.parametrize("format, group", GROUPS)
def test_gelu(format: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, dy = data(*shape, dtype), data(*shape, dtype, seed=1)
    y, amax, *kept = ops.quantized_gelu(x, format, group)
    values = check_kept(x, *kept, quantizer(format, group)).cuda()
    slope = 2 * math.sqrt(2 / math.pi)
    z = slope * (values + 0.044715 * values**3)
    open, steep = torch.sigmoid(z), torch.sigmoid(z) * torch.sigmoid(-z)
    assert y.dtype is dtype and torch.equal(amax, y.float().abs().amax(1))
    check(y, values * open, values.abs(), sigmoid_count(z))
    dx, amax = ops.quantized_gelu_backward(dy, *kept, format, group)
    assert dx.dtype is dtype and torch.equal(amax, dx.float().abs().amax(1))
    rise = values * steep * slope * (1 + 3 * 0.044715 * values**2)
    check(
        dx,
        dy.double() * (open + rise),
        dy.double().abs() * (1 + rise.abs()),
        sigmoid_count(z),
        dy.double().abs() * (1 + values.abs() ** 3),
    )


# --- all of them ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_shows_in_its_token_alone(format: str, bad: float) -> None:
    """In its group where nothing is summed."""
    x, weight = torch.randn(6, 512).bfloat16().cuda(), torch.ones(512).cuda()
    x[4, 100] = bad
    dy = torch.ones(6, 512).bfloat16().cuda()
    for centered in (False, True):
        y, amax, *kept = ops.quantized_norm(x, weight, weight, EPS, centered, format, 32)
        dx, _, _ = ops.quantized_norm_backward(dy, *kept, weight, True, EPS, centered, format, 32)
        for tensor in (y, dx, amax[:, None]):
            assert (~tensor.isfinite().all(1)).nonzero().tolist() == [[4]]
        assert kept[1][4, 3] == 255
    y, amax, *kept = ops.quantized_gelu(x, format, 32)
    dx, heard = ops.quantized_gelu_backward(dy, *kept, format, 32)
    assert torch.equal(kept[1].eq(255).nonzero().cpu(), torch.tensor([[4, 3]]))
    both, _, *kept = ops.quantized_gated_silu(torch.stack((dy, x), 2).flatten(1), format, 32)
    dboth, _ = ops.quantized_gated_silu_backward(dy, *kept, format, 32)
    for tensor, first in ((y, 96), (dx, 96), (both, 96), (dboth, 192)):
        broken = ~tensor.isfinite()
        assert broken[4].any()
        broken[4, first : first * 4 // 3] = False
        assert not broken.any()
    assert not amax[4].isfinite() and not heard[4].isfinite() and amax.isfinite().sum() == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (17, 11008)], ids=str)
@pytest.mark.parametrize("format, group", GROUPS)
def test_two_passes_have_the_bits_of_one(format: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Codes by an op of their own, and y and amax from them; with a NaN and an Inf."""
    x, how = data(*shape, dtype), (format, group)
    x[0, 40], x[-1, 200] = math.nan, math.inf
    weight = 1 + 0.3 * data(1, shape[1], torch.float32, seed=2)[0]
    codes = ops.group_codes(x, *how, 1)
    pairs = [((*ops.gelu_of_codes(*codes, *how, dtype), *codes), ops.quantized_gelu(x, *how))]
    for norm in ((weight, None, EPS, False), (weight, weight.flip(0), EPS, True)):
        found = (*ops.norm_of_codes(*codes, *norm, *how, dtype), *codes)
        pairs.append((found, ops.quantized_norm(x, *norm, *how)))
    both = torch.stack((x, data(*shape, dtype, seed=1)), 2).flatten(1)
    y, amax, *parts = ops.quantized_gated_silu(both, *how)
    codes = ops.group_codes(both, *how, 2)
    found = (*ops.gated_silu_of_codes(*codes, *how, dtype), *codes)
    pairs.append((found, (y, amax, torch.cat(parts[::2]), torch.cat(parts[1::2]))))
    dy, halves = data(*shape, dtype, seed=3), [half for two in zip(*(c.chunk(2) for c in codes)) for half in two]
    of_views = ops.quantized_gated_silu_backward(dy, *halves, *how)
    pairs.append((of_views, ops.quantized_gated_silu_backward(dy, *parts, *how)))
    for two, one in pairs:
        for a, b in zip(two, one, strict=True):
            assert a.dtype is b.dtype and torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))


def test_views_and_other_groups() -> None:
    """Rows that do not begin at 16 bytes are copied first; what no kernel serves is refused, not computed wrongly."""
    whole = torch.randn(9, 256).bfloat16().cuda().flatten()
    x, weight = whole[1 : 1 + 8 * 256].view(8, 256), torch.ones(256).cuda()
    for found, wanted in zip(ops.quantized_gelu(x, "E4M3", 16), ops.quantized_gelu(x.clone(), "E4M3", 16), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    strided = torch.randn(256, 8).bfloat16().cuda().t()
    arguments = (weight, None, EPS, False, "E4M3", 16)
    for found, wanted in zip(
        ops.quantized_norm(strided, *arguments), ops.quantized_norm(strided.clone(), *arguments), strict=True
    ):
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    for format, group in (("E4M3", 8), ("E4M3", 48), ("INT8", 16)):
        with pytest.raises(RuntimeError):
            ops.quantized_gelu(torch.ones(4, 240).bfloat16().cuda(), format, group)


LAYERS = {
    "rmsnorm": lambda: RMSNorm(512, EPS),
    "layernorm": lambda: LayerNorm(512, EPS),
    "layernorm, no bias": lambda: LayerNorm(512, EPS, bias=False),
    "swiglu": lambda: SwiGLU(512, 768, bias=False),
    "gelu": lambda: GELU(512, 768, bias=True),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_one_kernel_is_the_layer(name: str, compiled: bool, recomputes: bool) -> None:
    """An observer takes the other form, op by op: its outputs differ by BF16's last bits."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, results, seen = LAYERS[name]().cuda(), [], []
    layer.quantizer, layer.recomputes = quantizer("E4M3", 16), recomputes
    for observer in (None, lambda *event: seen.append(event)):
        layer.observer = observer
        layer.zero_grad()
        x = data(64, 512, torch.bfloat16).view(2, 32, 512).requires_grad_()
        run = torch.compile(layer, fullgraph=True) if compiled and observer is None else layer
        y = run(x)
        y.backward(data(64, 512, torch.bfloat16, seed=1).view(2, 32, 512))
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert len(seen) == (2 if name == "swiglu" else 1)
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype and a.any()
        assert (a.double() - b.double()).norm() <= 4e-3 * b.double().norm()
    torch._dynamo.reset()
