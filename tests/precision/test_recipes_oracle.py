"""fp8_rowwise, fp8_block, mxfp8, fp4_mixed, nvfp4 and int8_switchback against their FP64 emulation: y, dX and dW.

The bounds are those of tests/precision/layers.py. `on_tensor_cores` runs the choice of a GPU on this machine: the ops
are the same, the folding and the epilogues are those of the FP8 paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision import gemm
from lowprec_train.precision.recipe import LinearRecipe, override
from lowprec_train.recipes import (
    fp4_fold,
    fp4_mixed,
    fp8_block,
    fp8_eden4,
    fp8_rowwise,
    int8_switchback,
    mxfp8,
    nvfp4,
    quartet2,
    reduced_mantissa,
    ufp4,
    w4a8,
)
from tests.oracle import rotate_float32
from tests.oracle_linear import ROTATION, WGRAD, Passes, linear_plain
from tests.oracle_recipes import (
    NV,
    UFP4,
    Quartet,
    linear_fp4_fold,
    linear_fp4_mixed,
    linear_fp8_block,
    linear_fp8_eden4,
    linear_fp8_rowwise,
    linear_int8_switchback,
    linear_mxfp8,
    linear_nvfp4,
    linear_quartet2,
    linear_reduced_mantissa,
    linear_ufp4,
    linear_w4a8,
)
from tests.precision.layers import (
    DATA,
    DTYPES,
    FIRST_TOKEN,
    RUN_SEED,
    SITE,
    STEP,
    Sizes,
    U,
    assert_within,
    heavy_tails,
    linear,
    make,
    outlier_channels,
    plain_data,
    rounded_to_bf16,
    run,
    seeds,
)

# tokens, in, out: every reduction is one block of 128, two and three of them, and no two of a layer are alike
SIZES = [(128, 128, 128), (128, 256, 384), (256, 384, 128), (384, 128, 256)]
MIDDLE = (128, 256, 384)
NVFP4 = NV(seeds, FIRST_TOKEN)
UNIFORM = UFP4(seeds, FIRST_TOKEN)
QUARTET = Quartet(seeds, FIRST_TOKEN)
OPERAND = {"saved_input": "operand"}
Emulation = Callable[..., Passes]
NEW: dict[str, tuple[Callable[[], LinearRecipe], Emulation]] = {
    "fp8_rowwise": (fp8_rowwise.recipe, linear_fp8_rowwise),
    "fp8_block": (fp8_block.recipe, linear_fp8_block),
    "mxfp8": (mxfp8.recipe, linear_mxfp8),
    "fp4_mixed": (fp4_mixed.feed_forward, linear_fp4_mixed),
    "nvfp4": (nvfp4.recipe, lambda x, w, dy, **options: linear_nvfp4(x, w, dy, NVFP4, **options)),
    "quartet2": (quartet2.recipe, lambda x, w, dy, **options: linear_quartet2(x, w, dy, QUARTET, **options)),
    "w4a8": (w4a8.recipe, linear_w4a8),
    "reduced_mantissa": (reduced_mantissa.recipe, linear_reduced_mantissa),
    "ufp4": (ufp4.recipe, lambda x, w, dy, **options: linear_ufp4(x, w, dy, UNIFORM, **options)),
    "fp4_fold": (fp4_fold.recipe, lambda x, w, dy, **options: linear_fp4_fold(x, w, dy, seeds, **options)),
    "fp8_eden4": (fp8_eden4.recipe, lambda x, w, dy, **options: linear_fp8_eden4(x, w, dy, seeds, **options)),
    "int8_switchback": (int8_switchback.recipe, linear_int8_switchback),
}


def compare(name: str, data: Callable, format: str, sizes: Sizes) -> None:
    recipe, emulate = NEW[name]
    x, w, dy = make(data, format, sizes)
    got = run(linear(recipe(), w), x, dy, format)
    assert_within(got, emulate(x, w, dy, format=format), format, plain_weight=name == "int8_switchback")


@pytest.fixture
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 9))


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NEW)
def test_against_the_oracle(name, data, sizes, format):
    compare(name, data, format, sizes)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block", "mxfp8", "fp4_mixed", "nvfp4", "w4a8", "fp4_fold"])
def test_the_paths_of_a_gpu(name, data, sizes, on_tensor_cores):
    """FP8 carriers, folded blocks and epilogue scales multiply the same numbers as the dequantised product."""
    compare(name, data, "BF16", sizes)


OPTIONS = [
    (fp8_rowwise.recipe(gradient="E5M2"), lambda *a: linear_fp8_rowwise(*a, "E5M2", "FP32")),
    (fp8_block.recipe(block=32), lambda *a: linear_fp8_block(*a, 32, "FP32")),
    (mxfp8.recipe(gradient="E5M2"), lambda *a: linear_mxfp8(*a, "E5M2", "FP32")),
    (fp4_mixed.feed_forward(block=32), lambda *a: linear_fp4_mixed(*a, 32, format="FP32")),
    (fp4_mixed.feed_forward(gradient="E4M3"), lambda *a: linear_fp4_mixed(*a, gradient="E4M3", format="FP32")),
    (nvfp4.recipe(stochastic=False), lambda *a: linear_nvfp4(*a, replace(NVFP4, stochastic=False), "FP32")),
    (nvfp4.recipe(rotation=0), lambda *a: linear_nvfp4(*a, replace(NVFP4, rotation=0), "FP32")),
    (nvfp4.recipe(square=False), lambda *a: linear_nvfp4(*a, replace(NVFP4, square=False), "FP32")),
    (nvfp4.recipe(row_scaled=True), lambda *a: linear_nvfp4(*a, replace(NVFP4, row_scaled=True), "FP32")),
    (nvfp4.recipe(select="4over6"), lambda *a: linear_nvfp4(*a, replace(NVFP4, selects=True), "FP32")),
    (quartet2.recipe(rotation=0), lambda *a: linear_quartet2(*a, replace(QUARTET, rotation=0), "FP32")),
    (quartet2.recipe(rotation=32), lambda *a: linear_quartet2(*a, replace(QUARTET, rotation=32), "FP32")),
    (quartet2.recipe(select="none"), lambda *a: linear_quartet2(*a, replace(QUARTET, selects=False), "FP32")),
    *(
        (
            reduced_mantissa.recipe(mantissa_bits=bits, rounding=how),
            lambda *a, bits=bits, how=how: linear_reduced_mantissa(*a, bits, how, "FP32"),
        )
        for bits, how in ((6, "truncate"), (4, "nearest"), (1, "nearest"))
    ),
    (override(fp8_eden4.recipe(), OPERAND), lambda *a: linear_fp8_eden4(*a, seeds, "FP32", codes=False)),
    (w4a8.recipe(gradient="E4M3"), lambda *a: linear_w4a8(*a, "E4M3", "FP32")),
    (ufp4.recipe(stochastic=False), lambda *a: linear_ufp4(*a, replace(UNIFORM, stochastic=False), "FP32")),
    (ufp4.recipe(rotation=0), lambda *a: linear_ufp4(*a, replace(UNIFORM, rotation=0), "FP32")),
    (ufp4.recipe(rotation=64), lambda *a: linear_ufp4(*a, replace(UNIFORM, rotation=64), "FP32")),
    (nvfp4.recipe(rotation=64), lambda *a: linear_nvfp4(*a, replace(NVFP4, rotation=64), "FP32")),
]


@pytest.mark.parametrize("recipe, emulate", OPTIONS)
@pytest.mark.parametrize("data", [heavy_tails, outlier_channels], ids=lambda f: f.__name__)
def test_options(recipe, emulate, data):
    x, w, dy = make(data, "FP32", MIDDLE)
    assert_within(run(linear(recipe, w), x, dy, "FP32"), emulate(x, w, dy), "FP32")


@pytest.mark.parametrize("fold", [False, True])
def test_blocks_far_below_their_row(fold, monkeypatch):
    """A block's exponent stays within 28 binades of X's row, 14 of W's. What lies 30 and 16 below keeps fewer codes;
    it makes all of y here, since the other operand is zero where the row is large."""
    monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 9) if fold else None)
    x, w, dy = make(plain_data, "BF16", (128, 384, 128))
    x, w = x * np.repeat([1, 2.0**-30, 0], 128), w * np.repeat([0, 2.0**-16, 1], 128)
    got = run(linear(fp4_mixed.feed_forward(), w), x, dy, "BF16")
    assert_within(got, linear_fp4_mixed(x, w, dy), "BF16")


def test_dy_is_rounded_twice_where_one_gemm_rotates_it():
    """fp4_mixed rounds dY once for both GEMMs, with one scale of the tensor; not so when wgrad's is rotated."""
    x, w, dy = make(heavy_tails, "FP32", MIDDLE)
    recipe = override(fp4_mixed.feed_forward(), {"wgrad": {"rotation": {"block": 16}}})
    assert recipe.dgrad.a == recipe.wgrad.a
    want = linear_fp4_mixed(x, w, dy, format="FP32", rotate=lambda m: rotate_float32(m, seeds(WGRAD, ROTATION), 16))
    assert_within(run(linear(recipe, w), x, dy, "FP32"), want, "FP32")


@pytest.mark.parametrize("name", ["fp8_rowwise", "int8_switchback"])
def test_row_and_tensor_scales_take_any_size(name):
    """13 is no multiple of anything that integer or FP8 tensor cores ask for."""
    g = np.random.default_rng(3)
    x, w, dy = (g.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((5, 13), (7, 13), (5, 7)))
    recipe, emulate = NEW[name]
    assert_within(run(linear(recipe(), w), x, dy, "FP32"), emulate(x, w, dy, format="FP32"), "FP32")


@pytest.mark.parametrize("name", NEW)
def test_bias_is_added_in_high_precision_terms(name):
    """y + b costs at most one more BF16 rounding of the sum and one of the bias; db is the sum of dY."""
    x, w, dy = make(heavy_tails, "BF16", MIDDLE)
    b = np.random.default_rng(1).standard_normal(len(w))
    recipe, emulate = NEW[name]
    layer = linear(recipe(), w, b)
    y, _, _ = run(layer, x, dy, "BF16")
    want = emulate(x, w, dy).y
    total = want.value + b
    assert (np.abs(y.double().numpy() - total) <= rounded_to_bf16(total, want, b)).all()
    db = dy.sum(0)
    assert (np.abs(layer.bias.grad.double().numpy() - db) <= 2.0**-8 * np.abs(db) + 200 * U * np.abs(dy).sum(0)).all()


@pytest.mark.parametrize("name", NEW)
def test_leading_dimensions_are_tokens(name):
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    recipe = NEW[name][0]()
    flat = run(linear(recipe, w), x, dy, "BF16")
    shaped = run(linear(recipe, w), x.reshape(2, 4, 16, -1), dy.reshape(2, 4, 16, -1), "BF16")
    for a, b in zip(shaped, flat):
        assert torch.equal(a.reshape(b.shape), b)


@pytest.mark.parametrize("name", NEW)
def test_nothing_makes_nothing(name):
    """Zero inputs and zero gradients are zeros, not numbers over zero scales."""
    x, w, dy = (np.zeros_like(each) for each in make(plain_data, "BF16", MIDDLE))
    for tensor in run(linear(NEW[name][0](), w), x, dy, "BF16"):
        assert not tensor.any()


COSINES = {  # y, dX, dW: well above a dead or transposed GEMM (0), below what the formats give
    "fp8_rowwise": (0.998, 0.998, 0.998),
    "fp8_block": (0.998, 0.998, 0.998),
    "mxfp8": (0.998, 0.998, 0.998),
    "fp4_mixed": (0.98, 0.997, 0.997),
    "nvfp4": (0.985, 0.98, 0.98),
    "quartet2": (0.985, 0.98, 0.98),
    "w4a8": (0.99, 0.99, 0.997),
    "reduced_mantissa": (0.998, 0.998, 0.998),
    "ufp4": (0.985, 0.98, 0.98),
    "fp4_fold": (0.985, 0.985, 0.98),
    "fp8_eden4": (0.998, 0.985, 0.985),
    "int8_switchback": (0.9995, 0.9995, 0.99999),
}


@pytest.mark.parametrize("name", NEW)
def test_results_point_where_bf16s_do(name):
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    exact = linear_plain(x, w, dy)
    got = run(linear(NEW[name][0](), w), x, dy, "BF16")
    for tensor, want, cosine in zip(got, (exact.y, exact.dx, exact.dw), COSINES[name]):
        a, b = tensor.double().numpy().ravel(), want.value.ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > cosine


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NEW)
def test_non_finite_numbers_reach_what_they_touch(name, bad):
    recipe = NEW[name][0]()
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    x[4, 9] = bad
    y, _, dw = run(linear(recipe, w), x, dy, "BF16")
    assert not torch.isfinite(y[4]).any() and not torch.isfinite(dw[:, 9]).all()
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    dy[4, 9] = bad
    _, dx, dw = run(linear(recipe, w), x, dy, "BF16")
    assert not torch.isfinite(dx[4]).any() and not torch.isfinite(dw[9]).any()


def moved(step: int, first_token: int, site: int = SITE):
    return SeedTable(RUN_SEED, 4).at(step, first_token).site(site)


@pytest.mark.parametrize(
    "other", [(STEP + 1, FIRST_TOKEN), (STEP, FIRST_TOKEN + 8), (STEP, FIRST_TOKEN, SITE + 1)], ids=str
)
def test_nvfp4_draws_in_the_backward_pass_only(other):
    """Another step, micro-batch or layer: the same y, another dX and dW."""
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    first, again, layer = (linear(nvfp4.recipe(), w) for _ in range(3))
    layer.draws = moved(*other)
    a, b, c = (run(each, x, dy, "BF16") for each in (first, again, layer))
    assert all(torch.equal(*pair) for pair in zip(a, b))
    assert torch.equal(a[0], c[0]) and not torch.equal(a[1], c[1]) and not torch.equal(a[2], c[2])


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block", "mxfp8", "fp4_mixed", "w4a8", "int8_switchback"])
def test_the_others_draw_nothing(name):
    recipe = NEW[name][0]()
    assert not recipe.draws
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    layers = [linear(recipe, w) for _ in range(2)]
    layers[1].draws = moved(STEP + 1, 0)
    assert all(torch.equal(*pair) for pair in zip(*(run(layer, x, dy, "BF16") for layer in layers)))


def test_a_micro_batch_draws_what_the_batch_does():
    """dX of the second half of the tokens, run alone, is what it is within the whole: draws go by the token. One token
    carries the largest gradient of both, which makes the tensor's scale."""
    x, w, dy = make(plain_data, "BF16", MIDDLE)
    dy[0], dy[64] = 8, 8
    whole = run(linear(nvfp4.recipe(), w), x, dy, "BF16")[1]
    layer = linear(nvfp4.recipe(), w)
    layer.draws = moved(STEP, FIRST_TOKEN + 64)
    assert torch.equal(run(layer, x[64:], dy[64:], "BF16")[1], whole[64:])


def test_nvfp4_gradients_are_unbiased():
    """Their mean lies at what an unrounded dY gives with the same codes of X and W, within its standard error."""
    steps = 256
    x, w, dy = (a.astype(np.float32).astype(np.float64) for a in plain_data(np.random.default_rng(2), (64, 32, 48)))
    dy[:, 3] *= 30
    dy[32:] *= 1e-2
    unrounded = override(nvfp4.recipe(rotation=0), {"dgrad": {"a": None}, "wgrad": {"a": None}, "saved_input": "INPUT"})
    exact = run(linear(unrounded, w), x, dy, "FP32")[1:]
    layer, table = linear(nvfp4.recipe(rotation=0), w), SeedTable(1, 1)
    samples: list[list[np.ndarray]] = [[], []]
    for step in range(steps):
        layer.draws = table.at(step, 0).site(0)
        layer.weight.grad = None
        for kept, tensor in zip(samples, run(layer, x, dy, "FP32")[1:]):
            kept.append(tensor.double().numpy())
    for kept, want in zip(samples, exact):
        stack = np.stack(kept)
        sigma = stack.std(0, ddof=1)
        z = (stack.mean(0) - want.double().numpy()) / (sigma / np.sqrt(steps))
        assert (sigma > 0).all() and 0.7 < (z**2).mean() < 1.4 and abs(z.mean()) < 0.15
