"""The mean split on every recipe: what the products are in exact arithmetic, and what becomes of a common vector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import Operand
from lowprec_train.numerics.formats import FP32
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.precision.all_gathered_weight import weight_codes
from lowprec_train.precision.linear_plan import OperandPlan
from lowprec_train.precision.mean_split import mean_product, rank_one, without_mean
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput, override
from lowprec_train.precision.schedule import forward_only
from lowprec_train.recipes import averis, bf16, fp4, fp8, fp8_block, fp8_rowwise, int8_switchback, mxfp4, mxfp8, nvfp4
from tests.oracle_linear import linear_fp4, linear_fp8, linear_plain
from tests.oracle_recipes import NV, linear_fp8_block, linear_fp8_rowwise, linear_mxfp8, linear_nvfp4, without_means
from tests.precision.layers import (
    FIRST_TOKEN,
    assert_within,
    heavy_tails,
    linear,
    make,
    outlier_channels,
    plain_data,
    run,
    seeds,
)

SIZES = (128, 256, 384)
NVFP4 = NV(seeds, FIRST_TOKEN)
ROUNDS_ALL = {
    "fp8": (fp8.recipe, linear_fp8),
    "fp8_rowwise": (fp8_rowwise.recipe, linear_fp8_rowwise),
    "fp8_block": (fp8_block.recipe, linear_fp8_block),
    "mxfp8": (mxfp8.recipe, linear_mxfp8),
    "fp4": (lambda: fp4.recipe(dge_k=1), lambda *a, **how: linear_fp4(*a, k=1, **how)),
    "fp4 residual": (
        lambda: fp4.recipe(dge_k=1, outliers="residual"),
        lambda *a, **how: linear_fp4(*a, k=1, variant="residual", **how),
    ),
    "nvfp4": (nvfp4.recipe, lambda *a, **how: linear_nvfp4(*a, NVFP4, **how)),
}
EXACT = Gemm(a=Quantizer(FP32), b=Quantizer(FP32))


def shifted(data):
    """With a mean of many deviations in some channels of X and of dY."""

    def made(g, sizes):
        x, w, dy = data(g, sizes)
        return x + 20 * g.standard_normal(x.shape[1]) ** 3, w, dy + g.standard_normal(dy.shape[1]) * np.abs(dy).mean()

    return made


@pytest.mark.parametrize("data", [plain_data, heavy_tails, outlier_channels], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ROUNDS_ALL)
def test_against_the_oracle(name, data):
    recipe, emulate = ROUNDS_ALL[name]
    x, w, dy = make(shifted(data), "FP32", SIZES)
    want = without_means(emulate, x, w, dy, format="FP32")
    assert_within(run(linear(averis.recipe(of=recipe()), w), x, dy, "FP32"), want, "FP32")


@pytest.mark.parametrize("saved", [SavedInput.INPUT, SavedInput.CODES, SavedInput.OPERAND])
def test_without_rounding_it_is_the_plain_layer(saved):
    x, w, dy = make(shifted(plain_data), "FP32", SIZES)
    recipe = LinearRecipe(fprop=EXACT, dgrad=EXACT, wgrad=EXACT, saved_input=saved, mean_split=True)
    want = linear_plain(x, w, dy, "FP32")
    for name, tensor in zip(("y", "dx", "dw"), run(linear(recipe, w), x, dy, "FP32")):
        product = getattr(want, name)
        bound = 4 * (product.k + 8) * 2.0**-24 * product.magnitude
        assert (np.abs(tensor.double().numpy() - product.value) <= bound).all(), name


def seen(recipe: LinearRecipe, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, Quantized]:
    found: dict[str, Quantized] = {}
    layer = linear(recipe, w)

    def observe(how: OperandPlan, matrix: torch.Tensor, codes: Quantized) -> None:
        found[how.name if how.operand is Operand.A or how.name == "X^T" else "W"] = codes

    layer.observer = observe
    run(layer, x, dy, "FP32")
    return found


@pytest.mark.parametrize("name", ROUNDS_ALL)
def test_a_vector_common_to_all_tokens_changes_no_code(name):
    """Of integers over a power of two, whose means and differences FP32 holds."""
    g, recipe = np.random.default_rng(5), averis.recipe(of=ROUNDS_ALL[name][0]())
    x, w, dy = (g.integers(-64, 65, shape) / 8.0 for shape in ((128, 256), (384, 256), (128, 384)))
    before = seen(recipe, x, w, dy)
    after = seen(recipe, x + g.integers(-512, 513, 256) / 8, w, dy + g.integers(-512, 513, 384) / 8)
    assert before.keys() == after.keys() and {"X", "dY"} <= before.keys()
    for operand, codes in before.items():
        assert torch.equal(codes.codes.view(torch.uint8), after[operand].codes.view(torch.uint8)), operand
        assert torch.equal(codes.scale, after[operand].scale), operand


def test_the_mean_is_that_of_any_order_of_the_tokens():
    x = (torch.randn(512, 64, generator=torch.Generator().manual_seed(1)) * 1e3 + 7).bfloat16()
    rest, mean = without_mean(x)
    for order in (torch.arange(511, -1, -1), torch.randperm(512, generator=torch.Generator().manual_seed(2))):
        again, same = without_mean(x[order])
        assert torch.equal(same, mean) and torch.equal(again, rest[order])


def test_the_products_of_means():
    g = torch.Generator().manual_seed(3)
    mean, weight, other = (torch.randn(shape, generator=g) for shape in ((96,), (40, 96), (40,)))
    weight = weight.bfloat16()
    exact = mean.double() @ weight.double().t()
    assert (mean_product(mean, weight) - exact).abs().max() <= 2.0**-20 * (
        mean.abs().double() @ weight.abs().double().t()
    ).max()
    assert torch.equal(rank_one(other, mean, 256), 256 * other[:, None] * mean[None, :])


@pytest.mark.parametrize("build", [mxfp4.recipe, int8_switchback.recipe])
def test_only_what_is_rounded_is_split(build):
    """A GEMM in BF16 is the plain one bit for bit."""
    x, w, dy = make(shifted(plain_data), "BF16", SIZES)
    ours, plain = (run(linear(recipe, w), x, dy, "BF16") for recipe in (averis.recipe(of=build()), bf16.recipe()))
    untouched = [gemm.is_identity for gemm in build().gemms().values()]
    assert [torch.equal(*pair) for pair in zip(ours, plain)] == untouched and any(untouched)


@pytest.mark.parametrize(
    "build", [fp8.recipe, nvfp4.recipe, mxfp8.recipe], ids=lambda f: f.__module__.rsplit(".", 1)[1]
)
def test_a_mean_costs_no_codes(build):
    """Where channels have means of 20 deviations, errors fall by an order of magnitude."""
    g = np.random.default_rng(1)
    x, w, dy = (g.standard_normal(shape) for shape in ((128, 256), (384, 256), (128, 384)))
    x, dy = x + 20 * g.standard_normal(256), dy + 20 * g.standard_normal(384)
    exact = linear_plain(x, w, dy, "FP32")
    errors = []
    for recipe in (build(), averis.recipe(of=build())):
        got = run(linear(recipe, w), x.astype(np.float32), dy.astype(np.float32), "FP32")
        wanted = (exact.y.value, exact.dx.value, exact.dw.value)
        errors.append([np.linalg.norm(t.double().numpy() - v) / np.linalg.norm(v) for t, v in zip(got, wanted)])
    assert all(split < 0.2 * whole for whole, split in zip(*errors)), errors


def test_it_is_a_field_like_any_other():
    split = averis.recipe(of=nvfp4.recipe())
    assert split == replace(nvfp4.recipe(), mean_split=True) == override(nvfp4.recipe(), {"mean_split": True})
    assert override(split, {"mean_split": False}) == nvfp4.recipe()
    assert weight_codes(nvfp4.recipe()) is not None and weight_codes(split) is None
    assert forward_only(split, bf16.recipe()).mean_split
    with pytest.raises(ValueError, match="mean_split"):
        averis.recipe(of=bf16.recipe())
