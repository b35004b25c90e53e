"""Whole linears against their FP64 emulation: y, dX and dW of bf16, fp8, fp4, mxfp4 and mxfp4_fp8.

What may differ is said in tests/precision/layers.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.recipes import bf16, fp4, fp8, mxfp4, mxfp4_fp8
from tests import oracle
from tests.oracle_linear import (
    MX,
    Passes,
    linear_fp4,
    linear_fp8,
    linear_mxfp4,
    linear_mxfp4_fp8,
    linear_plain,
)
from tests.precision.layers import (
    DATA,
    DTYPES,
    FIRST_TOKEN,
    IN,
    OUT,
    RUN_SEED,
    SITE,
    STEP,
    TOKENS,
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


def residual_roundings(body: Passes, total: Passes) -> dict[str, np.ndarray]:
    """What the residual variant adds in BF16: R's GEMMs write BF16, and so does fprop's other GEMM before the sum."""
    outer = {"y": np.abs(total.y.value - body.y.value), "dW": np.abs(total.dw.value - body.dw.value)}
    return {"y": 2.0**-8 * (1 + 2.0**-7) * (outer["y"] + np.abs(body.y.value)), "dW": 2.0**-8 * outer["dW"]}


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
class TestAgainstTheOracle:
    def test_bf16(self, data, format):
        x, w, dy = make(data, format)
        got = run(linear(bf16.recipe(), w), x, dy, format)
        assert_within(got, linear_plain(x, w, dy, format), format, plain_weight=True)

    @pytest.mark.parametrize("gradient", ["E5M2", "E4M3"])
    def test_fp8(self, data, format, gradient):
        x, w, dy = make(data, format)
        got = run(linear(fp8.recipe(gradient=gradient), w), x, dy, format)
        assert_within(got, linear_fp8(x, w, dy, gradient, format), format)

    @pytest.mark.parametrize("variant", ["carrier", "residual"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"alpha": 0.9}, {"alpha": 1.0}, {"gradient": "E4M3"}, {"k": 1.0}, {"k": 3.0, "cap": 2.0}],
        ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "defaults",
    )
    def test_fp4(self, data, format, variant, options):
        x, w, dy = make(data, format)
        named = {{"k": "dge_k", "cap": "dge_cap"}.get(key, key): value for key, value in options.items()}
        got = run(linear(fp4.recipe(outliers=variant, **named), w), x, dy, format)
        want = linear_fp4(x, w, dy, variant=variant, format=format, **options)
        more = None
        if variant == "residual" and format == "BF16":
            kept = oracle.body(x, options.get("alpha", 0.99))
            more = residual_roundings(
                linear_fp4(kept, w, dy, variant=variant, format=format, **{**options, "alpha": 1.0}), want
            )
        assert_within(got, want, format, slack=2.0**-22, more=more)

    @pytest.mark.parametrize("rotation, stochastic", [(64, True), (16, True), (0, True), (64, False), (0, False)])
    def test_mxfp4(self, data, format, rotation, stochastic):
        x, w, dy = make(data, format)
        got = run(linear(mxfp4.recipe(rotation=rotation, stochastic=stochastic), w), x, dy, format)
        mx = MX(seeds, FIRST_TOKEN, rotation, stochastic)
        assert_within(got, linear_mxfp4(x, w, dy, mx, format), format)

    @pytest.mark.parametrize("rotation, stochastic", [(64, True), (0, True), (64, False)])
    def test_mxfp4_fp8(self, data, format, rotation, stochastic):
        x, w, dy = make(data, format)
        got = run(linear(mxfp4_fp8.recipe(rotation=rotation, stochastic=stochastic), w), x, dy, format)
        mx = MX(seeds, FIRST_TOKEN, rotation, stochastic)
        assert_within(got, linear_mxfp4_fp8(x, w, dy, mx, format), format)


RECIPES = {"fp8": fp8.recipe, "fp4": fp4.recipe, "mxfp4": mxfp4.recipe, "mxfp4_fp8": mxfp4_fp8.recipe}


def emulate(name: str, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> Passes:
    mx = MX(seeds, FIRST_TOKEN)
    return {
        "fp8": lambda: linear_fp8(x, w, dy),
        "fp4": lambda: linear_fp4(x, w, dy),
        "mxfp4": lambda: linear_mxfp4(x, w, dy, mx),
        "mxfp4_fp8": lambda: linear_mxfp4_fp8(x, w, dy, mx),
    }[name]()


@pytest.mark.parametrize("name", RECIPES)
def test_bias_is_added_in_high_precision_terms(name):
    """y + b costs at most one more BF16 rounding of the sum and one of the bias; db is the sum of dY."""
    x, w, dy = make(heavy_tails, "BF16")
    b = np.random.default_rng(1).standard_normal(OUT)
    layer = linear(RECIPES[name](), w, b)
    y, _, _ = run(layer, x, dy, "BF16")
    want = emulate(name, x, w, dy).y
    total = want.value + b
    assert (np.abs(y.double().numpy() - total) <= rounded_to_bf16(total, want, b)).all()
    db = dy.sum(0)
    assert (np.abs(layer.bias.grad.double().numpy() - db) <= 2.0**-8 * np.abs(db) + 200 * U * np.abs(dy).sum(0)).all()


@pytest.mark.parametrize("name", RECIPES)
def test_leading_dimensions_are_tokens(name):
    x, w, dy = make(plain_data, "BF16")
    flat = run(linear(RECIPES[name](), w), x, dy, "BF16")
    shaped = run(linear(RECIPES[name](), w), x.reshape(2, 64, IN), dy.reshape(2, 64, OUT), "BF16")
    assert torch.equal(shaped[0].reshape(TOKENS, OUT), flat[0])
    assert torch.equal(shaped[1].reshape(TOKENS, IN), flat[1])
    assert torch.equal(shaped[2], flat[2])


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_identity_is_f_linear_bit_for_bit(format, bias):
    x, w, dy = make(heavy_tails, format)
    b = np.linspace(-1, 1, OUT) if bias else None
    for recipe in (LinearRecipe(), bf16.recipe()):
        assert recipe.is_identity
        layer = linear(recipe, w, b)
        got = run(layer, x, dy, format)
        leaf = torch.from_numpy(x).to(DTYPES[format]).requires_grad_()
        weight = torch.from_numpy(w).float().requires_grad_()
        shift = None if b is None else torch.from_numpy(b).float().to(DTYPES[format])
        y = F.linear(leaf, weight.to(DTYPES[format]), shift)
        y.backward(torch.from_numpy(dy).to(y.dtype))
        assert torch.equal(got[0], y.detach()) and torch.equal(got[1], leaf.grad) and torch.equal(got[2], weight.grad)


COSINES = {  # y, dX, dW; for dW of fp4, DGE's mean slope .59 over its RMS .86, times the rounding's own cosine
    "fp8": (0.997, 0.997, 0.997),
    "fp4": (0.97, 0.98, 0.6),
    "mxfp4": (0.999, 0.95, 0.95),
    "mxfp4_fp8": (0.997, 0.95, 0.95),
}


@pytest.mark.parametrize("name", RECIPES)
def test_results_point_where_bf16s_do(name):
    """A dead or transposed GEMM has cosine 0."""
    x, w, dy = make(plain_data, "BF16")
    exact = linear_plain(x, w, dy)
    got = run(linear(RECIPES[name](), w), x, dy, "BF16")
    for tensor, want, cosine in zip(got, (exact.y, exact.dx, exact.dw), COSINES[name]):
        a, b = tensor.double().numpy().ravel(), want.value.ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > cosine


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*RECIPES, "fp4_residual"])
def test_non_finite_numbers_reach_what_they_touch(name, bad):
    recipe = fp4.recipe(outliers="residual") if name == "fp4_residual" else RECIPES[name]()
    x, w, dy = make(plain_data, "BF16")
    x[4, 9] = bad
    y, _, dw = run(linear(recipe, w), x, dy, "BF16")
    assert not torch.isfinite(y[4]).any() and not torch.isfinite(dw[:, 9]).all()
    x, w, dy = make(plain_data, "BF16")
    dy[4, 9] = bad
    _, dx, dw = run(linear(recipe, w), x, dy, "BF16")
    assert not torch.isfinite(dx[4]).any() and not torch.isfinite(dw[9]).any()


def test_draws_make_the_gradient():
    x, w, dy = make(plain_data, "BF16")
    first, again, moved = linear(mxfp4.recipe(), w), linear(mxfp4.recipe(), w), linear(mxfp4.recipe(), w)
    moved.draws = SeedTable(RUN_SEED, 4).at(STEP + 1, FIRST_TOKEN).site(SITE)
    a, b, c = (run(layer, x, dy, "BF16") for layer in (first, again, moved))
    assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    assert torch.equal(a[0], c[0]) and not torch.equal(a[1], c[1]) and not torch.equal(a[2], c[2])


def typical_distance(samples: np.ndarray, n: int) -> float:
    """Root mean square of the means of n samples, over all disjoint groups of n."""
    return float(np.sqrt((samples.reshape(-1, n, samples.shape[1]).mean(1) ** 2).mean()))


@pytest.mark.parametrize("rotation", [64, 0])
def test_the_stochastic_gemm_is_unbiased(rotation):
    """The mean of n gradients lies at the exact one within its standard error, which falls as 1 / sqrt(n)."""
    steps = 256
    x, w, dy = (a.astype(np.float32).astype(np.float64) for a in outlier_channels(np.random.default_rng(2)))
    x, w, dy = x[:64, :32], w[:, :32], dy[32:96]  # half of the tokens a million times smaller
    layer = linear(mxfp4.recipe(rotation=rotation), w)
    table = SeedTable(1, 1)
    samples: list[list[np.ndarray]] = [[], []]
    for step in range(steps):
        layer.draws = table.at(step, 0).site(0)
        layer.weight.grad = None
        for kept, tensor in zip(samples, run(layer, x, dy, "FP32")[1:]):
            kept.append(tensor.double().numpy())
    exact = linear_plain(x, w, dy, "FP32")
    for kept, want in zip(samples, (exact.dx.value, exact.dw.value)):
        stack = np.stack(kept)
        sigma = stack.std(0, ddof=1)
        live = sigma > 0
        z = ((stack.mean(0) - want)[live]) / (sigma[live] / np.sqrt(steps))
        assert live.mean() > 0.9 and 0.6 < (z**2).mean() < 1.6  # errors share rows: few degrees of freedom
        distance = [typical_distance((stack - want)[:, live] / sigma[live], n) for n in (4, steps)]
        assert 6 < distance[0] / distance[1] < 10.5  # sqrt(steps / 4) = 8
