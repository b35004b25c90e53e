"""Recipes as values: the published table, what cannot be written down, overrides, and the check before a run."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, INT4, INT8, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.estimators import DifferentiableEstimator, StraightThrough
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput, check, override
from lowprec_train.recipes import (
    bf16,
    fp4,
    fp4_fold,
    fp4_mixed,
    fp8,
    fp8_block,
    fp8_eden4,
    fp8_rowwise,
    int8_switchback,
    mxfp4,
    mxfp4_fp8,
    mxfp8,
    nvfp4,
    quartet2,
    reduced_mantissa,
    ufp4,
    w4a8,
)

TENSOR, ROW, MX = (-1, -1), (1, -1), (1, 32)
CODES = Reuse.FPROP_CODES
ROTATED = Gemm(a=Quantizer(E4M3), b=Quantizer(E4M3), rotation=RandomHadamard(16))
PLAIN = (
    bf16,
    fp8,
    fp8_rowwise,
    fp8_block,
    mxfp8,
    fp4,
    mxfp4,
    mxfp4_fp8,
    fp4_fold,
    fp8_eden4,
    nvfp4,
    quartet2,
    ufp4,
    w4a8,
    reduced_mantissa,
)
PLAIN += (int8_switchback,)
ALL = {m.__name__.rsplit(".", 1)[1]: m.recipe for m in PLAIN} | {"fp4_mixed": fp4_mixed.feed_forward}


def describe(q: Quantizer | Reuse | None) -> tuple | Reuse | None:
    return (q.format, q.tile, q.scale, q.stochastic) if isinstance(q, Quantizer) else q


E4M3_TENSOR = (E4M3, TENSOR, ScaleRule.POW2, False)
E5M2_TENSOR = (E5M2, TENSOR, ScaleRule.POW2, False)
E2M1_ROW = (E2M1, ROW, ScaleRule.FP32, False)
E5M2_ROW = (E5M2, ROW, ScaleRule.FP32, False)
MX_SR = (E2M1, MX, ScaleRule.E8M0_FLOOR, True)
MX_NEAREST = (E2M1, MX, ScaleRule.E8M0_CEIL, False)
E4M3_ROW = (E4M3, ROW, ScaleRule.POW2, False)
E5M2_POW2_ROW = (E5M2, ROW, ScaleRule.POW2, False)
LINE = (E4M3, (1, 128), ScaleRule.POW2, False)
SQUARE = (E4M3, (128, 128), ScaleRule.POW2, False)
MX_E4M3, MX_E5M2 = ((format, MX, ScaleRule.E8M0_CEIL, False) for format in (E4M3, E5M2))
E2M1_LINE = (E2M1, (1, 128), ScaleRule.E8M0_CEIL, False)
FOLD3 = (E2M1, (1, 16), ScaleRule.LADDER, False)
NV_LINE = (E2M1, (1, 16), ScaleRule.NVFP4, False)
NV_SQUARE = (E2M1, (16, 16), ScaleRule.NVFP4, False)
NV_EDEN = NV_SR = (E2M1, (1, 16), ScaleRule.NVFP4, True)
INT4_LINE, INT4_SR = ((INT4, (1, 16), ScaleRule.FP32, drawn) for drawn in (False, True))
E8M3 = (reduced_mantissa.FORMATS[3], TENSOR, ScaleRule.FP32, False)
INT8_ROW, INT8_TENSOR = (INT8, ROW, ScaleRule.FP32, False), (INT8, TENSOR, ScaleRule.FP32, False)


@pytest.mark.parametrize(
    "recipe, fprop, dgrad, wgrad, keep",
    [
        (bf16.recipe(), (None, None), (None, None), (None, None), SavedInput.INPUT),
        (fp8.recipe(), (E4M3_TENSOR, E4M3_TENSOR), (E5M2_TENSOR, CODES), (E5M2_TENSOR, CODES), SavedInput.CODES),
        (fp8.recipe(gradient="E4M3"), (E4M3_TENSOR,) * 2, (E4M3_TENSOR, CODES), (E4M3_TENSOR, CODES), SavedInput.CODES),
        (fp4.recipe(), (E2M1_ROW, E2M1_ROW), (E5M2_ROW, CODES), (E5M2_ROW, CODES), SavedInput.CODES),
        (mxfp4.recipe(), (None, None), (MX_SR, MX_SR), (MX_SR, MX_SR), SavedInput.INPUT),
        (mxfp4.recipe(stochastic=False), (None, None), (MX_NEAREST,) * 2, (MX_NEAREST,) * 2, SavedInput.INPUT),
        (mxfp4_fp8.recipe(), (E4M3_TENSOR,) * 2, (MX_SR, MX_SR), (MX_SR, MX_SR), SavedInput.CODES),
        (fp4_fold.recipe(), (FOLD3,) * 2, (FOLD3,) * 2, (FOLD3,) * 2, SavedInput.CODES),
        (fp8_eden4.recipe(), (E4M3_TENSOR,) * 2, (FOLD3,) * 2, (FOLD3,) * 2, SavedInput.CODES),
        (fp8_rowwise.recipe(), (E4M3_ROW,) * 2, (E4M3_ROW,) * 2, (E4M3_ROW,) * 2, SavedInput.INPUT),
        (
            fp8_rowwise.recipe(gradient="E5M2"),
            (E4M3_ROW,) * 2,
            (E5M2_POW2_ROW, E4M3_ROW),
            (E5M2_POW2_ROW, E4M3_ROW),
            SavedInput.INPUT,
        ),
        (mxfp8.recipe(), (MX_E4M3,) * 2, (MX_E4M3,) * 2, (MX_E4M3,) * 2, SavedInput.OPERAND),
        (mxfp8.recipe(gradient="E5M2"), (MX_E4M3,) * 2, *((MX_E5M2, MX_E4M3),) * 2, SavedInput.OPERAND),
        (fp8_block.recipe(), (LINE, SQUARE), (LINE, CODES), (LINE, LINE), SavedInput.OPERAND),
        (
            fp4_mixed.feed_forward(),
            (E2M1_LINE, E2M1_LINE),
            (E5M2_TENSOR, E4M3_TENSOR),
            (E5M2_TENSOR, E4M3_TENSOR),
            SavedInput.OPERAND,
        ),
        (nvfp4.recipe(), (NV_LINE, NV_SQUARE), (NV_SR, CODES), (NV_SR, NV_LINE), SavedInput.OPERAND),
        (
            nvfp4.recipe(stochastic=False),
            (NV_LINE, NV_SQUARE),
            (NV_LINE, CODES),
            (NV_LINE, NV_LINE),
            SavedInput.OPERAND,
        ),
        (quartet2.recipe(), (NV_LINE, NV_LINE), *((NV_EDEN, NV_EDEN),) * 2, SavedInput.CODES),
        (reduced_mantissa.recipe(), (E8M3, E8M3), (E8M3, E8M3), (E8M3, E8M3), SavedInput.INPUT),
        (reduced_mantissa.recipe(mantissa_bits=7), (None, None), (None, None), (None, None), SavedInput.INPUT),
        (w4a8.recipe(), (E4M3_TENSOR, MX_NEAREST), *((E5M2_TENSOR, CODES),) * 2, SavedInput.CODES),
        (ufp4.recipe(), (INT4_LINE, INT4_LINE), (INT4_SR, INT4_LINE), (INT4_SR, INT4_LINE), SavedInput.OPERAND),
        (nvfp4.recipe(square=False), (NV_LINE, NV_LINE), (NV_SR, NV_LINE), (NV_SR, NV_LINE), SavedInput.OPERAND),
        (int8_switchback.recipe(), (INT8_ROW, INT8_TENSOR), (INT8_ROW, CODES), (None, None), SavedInput.INPUT),
    ],
)
def test_the_published_table(recipe, fprop, dgrad, wgrad, keep):
    for gemm, operands in zip(recipe.gemms().values(), (fprop, dgrad, wgrad)):
        assert (describe(gemm.a), describe(gemm.b)) == operands
    assert recipe.saved_input is keep and recipe.saves_codes == (keep is SavedInput.CODES)


def test_the_published_constants():
    four, mx = fp4.recipe(), mxfp4.recipe()
    assert four.estimator == DifferentiableEstimator(k=5, cap=3)
    assert four.fprop.outliers == OutlierClamp(0.99, "carrier")
    assert fp4.recipe(outliers="residual", alpha=0.97).fprop.outliers == OutlierClamp(0.97, "residual")
    for gemm in (mx.dgrad, mx.wgrad):
        assert gemm.rotation == RandomHadamard(64) and gemm.split_accumulation
        assert (gemm.a.range_share, gemm.b.range_share) == (3 / 4, 3 / 4)
        assert (gemm.a.exponent_span, gemm.b.exponent_span) == (28, 14)
    assert mxfp4.recipe(rotation=0).dgrad.rotation is None
    assert mxfp4.recipe(rotation=128).wgrad.rotation == RandomHadamard(128)
    eight = fp8.recipe()
    assert [g.split_accumulation for g in eight.gemms().values()] == [False, True, True]


def test_the_published_constants_of_blocks():
    mixed, nv = fp4_mixed.feed_forward(), nvfp4.recipe()
    assert (mixed.fprop.a.exponent_span, mixed.fprop.b.exponent_span) == (28, 14)
    assert nv.wgrad.rotation == RandomHadamard(16) and nv.fprop.rotation is nv.dgrad.rotation is None
    assert nvfp4.recipe(rotation=0).wgrad.rotation is None
    assert nvfp4.recipe(row_scaled=True) == override(nv, {"fprop": {"a": {"outer": [1, -1]}}})
    assert nv.dgrad.a.range_share == nv.wgrad.a.range_share == 16 / 17
    assert nv.fprop.a.range_share == nv.fprop.b.range_share == nv.wgrad.b.range_share == 1
    assert nvfp4.recipe(stochastic=False).dgrad.a.range_share == 1
    assert fp8_block.recipe(block=64).fprop.b.tile == (64, 64) and fp8_block.recipe(block=64).wgrad.b.tile == (1, 64)
    assert fp4_mixed.feed_forward(block=64).fprop.a.tile == fp4_mixed.feed_forward(block=64).fprop.b.tile == (1, 64)
    assert fp4_mixed.feed_forward(gradient="E4M3").dgrad.a.format is E4M3
    assert [g.split_accumulation for g in fp8_rowwise.recipe().gemms().values()] == [False, True, True]
    for blocks in (fp8_block.recipe(), mixed):
        assert all(gemm.split_accumulation for gemm in blocks.gemms().values())


def test_what_only_some_recipes_do():
    recipes = {name: build() for name, build in ALL.items()}
    drawing = {"mxfp4", "mxfp4_fp8", "fp4_fold", "fp8_eden4", "nvfp4", "quartet2", "ufp4"}
    assert {name for name, recipe in recipes.items() if recipe.draws} == drawing
    assert {name for name, recipe in recipes.items() if recipe.estimator != StraightThrough()} == {"fp4"}
    assert {name for name, recipe in recipes.items() if recipe.fprop.outliers is not None} == {"fp4"}
    assert not any(gemm.codes_only for recipe in recipes.values() for gemm in recipe.gemms().values())
    assert nvfp4.recipe(stochastic=False).draws and not nvfp4.recipe(stochastic=False, rotation=0).draws


def test_identity():
    assert LinearRecipe().is_identity and bf16.recipe().is_identity and bf16.recipe() == LinearRecipe()
    assert not any(ALL[name]().is_identity for name in ALL if name != "bf16")
    assert list(LinearRecipe().gemms()) == ["fprop", "dgrad", "wgrad"]


@pytest.mark.parametrize("name", ALL)
def test_recipes_are_values(name):
    recipe = ALL[name]()
    assert recipe == ALL[name]() and hash(recipe) == hash(ALL[name]())
    with pytest.raises(FrozenInstanceError):
        recipe.fprop = Gemm()


@pytest.mark.parametrize(
    "build, names",
    [
        (lambda: LinearRecipe(dgrad=Gemm(b=CODES)), "dgrad"),
        (lambda: LinearRecipe(wgrad=Gemm(b=CODES)), "fprop"),
        (lambda: LinearRecipe(saved_input=SavedInput.CODES), "fprop"),
        (lambda: LinearRecipe(fprop=Gemm(b=CODES)), "fprop"),
        (lambda: Gemm(outliers=OutlierClamp()), "None"),
        (lambda: Gemm(a=Quantizer(E4M3, ROW), outliers=OutlierClamp()), "E4M3"),
        (lambda: Gemm(a=Quantizer(E2M1, TENSOR), outliers=OutlierClamp()), "E2M1"),
        (lambda: Gemm(rotation=RandomHadamard()), "rotation"),
        (lambda: Gemm(a=Quantizer(E2M1), rotation=RandomHadamard()), "rotation"),
        (lambda: Gemm(a=Quantizer(E2M1), b=CODES, rotation=RandomHadamard()), "rotation"),
        (lambda: LinearRecipe(estimator=DifferentiableEstimator()), "None"),
        (lambda: replace(fp8.recipe(), estimator=DifferentiableEstimator()), "E4M3"),
        (lambda: LinearRecipe(saved_input=SavedInput.OPERAND), "operand"),
        (lambda: LinearRecipe(wgrad=Gemm(a=Quantizer(E4M3)), saved_input=SavedInput.OPERAND), "operand"),
        (lambda: LinearRecipe(wgrad=Gemm(b=Quantizer(E4M3)), saved_input=SavedInput.OPERAND), "operand"),
        (lambda: replace(fp8.recipe(), saved_input=SavedInput.OPERAND), "operand"),
        (lambda: replace(int8_switchback.recipe(), saved_input=SavedInput.OPERAND), "operand"),
        (lambda: replace(fp8_block.recipe(), dgrad=Gemm(codes_only=True)), "codes_only"),
        (lambda: replace(fp8.recipe(), wgrad=Gemm(codes_only=True)), "codes_only"),
        (lambda: replace(fp4.recipe(), dgrad=fp4.recipe().fprop), "outlier"),
        (lambda: LinearRecipe(wgrad=fp4.recipe().fprop), "outlier"),
        (lambda: replace(int8_switchback.recipe(), fprop=Gemm()), "dgrad"),
        (lambda: replace(nvfp4.recipe(), fprop=replace(nvfp4.recipe().wgrad, rotation=RandomHadamard(16))), "rotated"),
        (lambda: LinearRecipe(fprop=ROTATED, wgrad=ROTATED, saved_input=SavedInput.CODES), "rotated"),
        (lambda: replace(ROTATED, a=Quantizer(E2M1, (1, -1)), outliers=OutlierClamp(variant="residual")), "residual"),
        (lambda: Gemm(a=Quantizer(E2M1, ROW, rounding=STOCHASTIC), outliers=OutlierClamp()), "stochastic"),
        (lambda: nvfp4.recipe(rotation=24), "24"),
        (lambda: ufp4.recipe(rotation=24), "24"),
        (lambda: quartet2.recipe(rotation=24), "24"),
        (lambda: quartet2.recipe(select="4over5"), "4over5"),
        (lambda: replace(nvfp4.recipe(), weight_from_codes=True), "dgrad.b fprop codes"),
        (lambda: replace(fp8_eden4.recipe(), saved_input=SavedInput.PACKED), "E4M3"),
        (lambda: override(fp4_fold.recipe(packed=True), {"wgrad": {"b": "fprop_codes", "rotation": None}}), "FOLD3"),
        (lambda: replace(mxfp4.recipe(), weight_from_codes=True), "fprop.b is None"),
        (lambda: override(nvfp4.recipe(), {"fprop": {"b": {"tile": [1, 16], "outer": [1, -1]}}}), "reuses"),
        (lambda: override(nvfp4.recipe(), {"fprop": {"b": {"outer": [1, -1]}}}), "outer"),
        (lambda: fp8_block.recipe(block=0), "0"),
        (lambda: fp4_mixed.feed_forward(block=-3), "-3"),
        (lambda: fp8_rowwise.recipe(gradient="E3M4"), "E3M4"),
        (lambda: reduced_mantissa.recipe(mantissa_bits=8), "1 to 7, not 8"),
        (lambda: reduced_mantissa.recipe(rounding="up"), "unknown rounding 'up'"),
        (lambda: fp4_mixed.feed_forward(gradient="E3M4"), "E3M4"),
        (lambda: fp4.recipe(gradient="E3M4"), "E3M4"),
        (lambda: mxfp8.recipe(gradient="E3M4"), "E3M4"),
        (lambda: fp8.recipe(gradient="E3M4"), "E3M4"),
        (lambda: fp4.recipe(outliers="sparse"), "sparse"),
        (lambda: fp4.recipe(alpha=0.4), "0.4"),
        (lambda: fp4.recipe(dge_k=0.5), "0.5"),
        (lambda: mxfp4.recipe(rotation=48), "48"),
    ],
)
def test_what_cannot_be_written_down(build, names):
    with pytest.raises(ValueError, match=names):
        build()


# --- check: sizes, before anything runs ---


@pytest.mark.parametrize(
    "recipe, sizes, said",
    [
        (mxfp4.recipe(), (96, 80, 64), ("dgrad", "32", "80")),
        (mxfp4.recipe(), (96, 64, 100), ("wgrad", "32", "100")),
        (mxfp4.recipe(), (96, 96, 64), ("dgrad", "64", "96")),
        (mxfp4.recipe(), (96, 64, 96), ("wgrad", "64", "96")),
        (mxfp4.recipe(rotation=0), (96, 48, 64), ("dgrad", "32", "48")),
        (mxfp4_fp8.recipe(), (96, 64, 32), ("wgrad", "64", "32")),
        (fp4_fold.recipe(), (24, 128, 128), ("fprop", "1x16", "24")),
        (fp4_fold.recipe(), (48, 192, 128), ("dgrad", "128", "192")),
        (fp8_eden4.recipe(), (48, 128, 64), ("wgrad", "128", "64")),
        (mxfp8.recipe(), (48, 64, 64), ("fprop", "32", "48")),
        (mxfp8.recipe(), (64, 48, 64), ("dgrad", "32", "48")),
        (mxfp8.recipe(), (64, 64, 48), ("wgrad", "32", "48")),
        (fp8_block.recipe(), (192, 128, 128), ("fprop", "128", "192")),
        (fp8_block.recipe(), (128, 192, 128), ("fprop", "128", "192")),
        (fp8_block.recipe(), (128, 128, 192), ("wgrad", "128", "192")),
        (fp8_block.recipe(block=64), (128, 128, 96), ("wgrad", "64", "96")),
        (fp4_mixed.feed_forward(), (192, 128, 128), ("fprop", "128", "192")),
        (nvfp4.recipe(), (40, 64, 64), ("fprop", "16", "40")),
        (ufp4.recipe(), (64, 64, 40), ("wgrad", "16", "40")),
        (quartet2.recipe(), (128, 192, 128), ("dgrad", "1x128", "192")),
        (quartet2.recipe(rotation=0), (128, 128, 64), ("wgrad", "1x128", "64")),
        (ufp4.recipe(rotation=64), (48, 64, 64), ("fprop", "64", "48")),
        (nvfp4.recipe(), (64, 40, 64), ("fprop", "16", "40")),
        (nvfp4.recipe(), (64, 64, 40), ("wgrad", "16", "40")),
        (nvfp4.recipe(rotation=64), (64, 64, 48), ("wgrad", "64", "48")),
        (override(mxfp4.recipe(), {"wgrad": {"rotation": {"block": 256}}}), (96, 64, 128), ("wgrad", "256", "128")),
        (override(fp8.recipe(), {"fprop": {"a": {"tile": [1, 128]}}}), (96, 64, 64), ("fprop", "128", "96")),
        (override(fp8.recipe(), {"fprop": {"b": {"tile": [128, 32]}}}), (96, 64, 64), ("fprop", "128", "64")),
    ],
)
def test_check_names_the_linear_the_gemm_and_the_numbers(recipe, sizes, said):
    in_features, out_features, tokens = sizes
    with pytest.raises(ValueError) as error:
        check(recipe, name="blocks.3.mlp.up", in_features=in_features, out_features=out_features, tokens=tokens)
    for part in ("blocks.3.mlp.up", *said):
        assert part in str(error.value)


@pytest.mark.parametrize("name", ALL)
def test_check_accepts_what_divides(name):
    check(ALL[name](), name="x", in_features=256, out_features=128, tokens=384)


def test_a_gemm_that_keeps_a_dimension_whole_lets_it_be():
    """Tokens are no reduction of fp4_mixed's blocks, nor outputs: 24 tokens and 40 outputs fit."""
    check(fp4_mixed.feed_forward(), name="x", in_features=128, out_features=40, tokens=24)


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp4", "fp8_rowwise", "int8_switchback"])
def test_tensor_and_row_tiles_take_any_size(name):
    check(ALL[name](), name="x", in_features=7, out_features=5, tokens=3)
