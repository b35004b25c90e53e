"""SwitchBack's invariants (arXiv 2304.13013): dW and db are the 16-bit layer's own, y is off by some 1.4 per cent at
any width, integer sums are exact, and without its quantisers nothing is left of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lowprec_train.precision.recipe import Gemm, override
from lowprec_train.recipes import bf16, int8_switchback
from tests.precision.layers import DATA, DTYPES, heavy_tails, linear, make, run

SIZES = (96, 128, 72)
BIAS = np.linspace(-1, 1, SIZES[2])


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
def test_dw_and_db_are_the_unquantised_layers(data, format):
    x, w, dy = make(data, format, SIZES)
    ours, plain = linear(int8_switchback.recipe(), w, BIAS), linear(bf16.recipe(), w, BIAS)
    got, want = run(ours, x, dy, format), run(plain, x, dy, format)
    assert torch.equal(got[2], want[2]) and torch.equal(ours.bias.grad, plain.bias.grad)
    assert not torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1])


def test_dw_and_db_are_the_unquantised_layers_compiled(fresh_compiler):
    x, w, dy = make(heavy_tails, "BF16", SIZES)
    eager = linear(bf16.recipe(), w, BIAS)
    want = run(eager, x, dy, "BF16")
    for recipe in (int8_switchback.recipe(), bf16.recipe()):
        layer = linear(recipe, w, BIAS)
        run(torch.compile(layer, backend="aot_eager", fullgraph=True), x, dy, "BF16")
        assert torch.equal(layer.weight.grad, want[2]) and torch.equal(layer.bias.grad, eager.bias.grad)


def test_eager_and_compiled_are_one(fresh_compiler):
    x, w, dy = make(heavy_tails, "BF16", SIZES)
    layers = [linear(int8_switchback.recipe(), w, BIAS) for _ in range(2)]
    compiled = torch.compile(layers[1], backend="aot_eager", fullgraph=True)
    assert all(torch.equal(*pair) for pair in zip(run(layers[0], x, dy, "BF16"), run(compiled, x, dy, "BF16")))


def relative(got: torch.Tensor, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - want) / np.linalg.norm(want))


@pytest.mark.parametrize("k", [512, 2048, 8192])
def test_the_error_does_not_grow_with_the_reduction(k):
    """Of y over in, and of dX over out: two independent roundings of some 1 per cent each."""
    g = np.random.default_rng(k)
    x, w, dy = g.standard_normal((64, k)), g.standard_normal((64, k)) * 0.02, g.standard_normal((64, 64))
    x, w = x.astype(np.float32).astype(np.float64), w.astype(np.float32).astype(np.float64)
    assert 1.2e-2 < relative(run(linear(int8_switchback.recipe(), w), x, dy, "FP32")[0], x @ w.T) < 1.6e-2
    _, dx, _ = run(linear(int8_switchback.recipe(), w.T.copy()), dy, x, "FP32")
    assert 1.2e-2 < relative(dx, x @ w.T) < 1.6e-2


def test_zero_rows_are_zeros():
    x, w, dy = make(heavy_tails, "BF16", SIZES)
    assert not x[3].any() and not dy[9].any()
    y, dx, dw = run(linear(int8_switchback.recipe(), w), x, dy, "BF16")
    assert not y[3].any() and not dx[9].any()
    assert all(torch.isfinite(tensor).all() for tensor in (y, dx, dw))


def extreme_codes(m: int, k: int, seed: int, positive: float) -> np.ndarray:
    """127 and -127, and one of 126 in each row: the scale is exactly 1, and not all sums of products are multiples of
    127^2."""
    g = np.random.default_rng(seed)
    codes = np.where(g.random((m, k)) < positive, 127.0, -127.0)
    codes[:, 1 + seed] -= np.sign(codes[:, 1 + seed])
    return codes


def test_integer_sums_are_exact_beyond_the_24_bits_of_fp32():
    """Sums of up to 8192 * 127^2 = 2^26.98 are rounded once, to the FP32 of the output."""
    k = 8192
    x, w = extreme_codes(16, k, 0, positive=0.97), extreme_codes(24, k, 1, positive=0.97)
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    assert np.abs(exact).min() > 2**24 and (exact % 8 != 0).any()
    dy = extreme_codes(24, k, 2, positive=0.97)
    y = run(linear(int8_switchback.recipe(), w), x, np.ones((16, 24)), "FP32")[0]
    assert torch.equal(y, torch.from_numpy(exact).float())
    dx = run(linear(int8_switchback.recipe(), x.T.copy()), np.ones((24, 16)), dy, "FP32")[1]
    assert torch.equal(dx, torch.from_numpy(dy.astype(np.int64) @ x.astype(np.int64).T).float())


@pytest.mark.parametrize("format", DTYPES)
def test_without_its_quantisers_it_is_the_plain_layer(format):
    """I7.3: with dgrad in 16 bits dX is plain and y as before; with fprop so too, all is."""
    x, w, dy = make(heavy_tails, format, SIZES)
    recipe = int8_switchback.recipe()
    whole, plain = (run(linear(each, w), x, dy, format) for each in (recipe, bf16.recipe()))
    y, dx, dw = run(linear(replace(recipe, dgrad=Gemm()), w), x, dy, format)
    assert torch.equal(y, whole[0]) and torch.equal(dx, plain[1]) and torch.equal(dw, plain[2])
    off = replace(recipe, fprop=Gemm(), dgrad=Gemm())
    assert off.is_identity
    assert all(torch.equal(*pair) for pair in zip(run(linear(off, w), x, dy, format), plain))


def test_dgrad_alone():
    """I7.3 the other way round: y in 16 bits, and dX from codes of the weight that are made for it."""
    x, w, dy = make(heavy_tails, "BF16", SIZES)
    codes_only = override(int8_switchback.recipe(), {"fprop": {"codes_only": True}})
    whole, plain = (run(linear(each, w), x, dy, "BF16") for each in (int8_switchback.recipe(), bf16.recipe()))
    y, dx, dw = run(linear(codes_only, w), x, dy, "BF16")
    assert torch.equal(y, plain[0]) and torch.equal(dx, whole[1]) and torch.equal(dw, whole[2])
