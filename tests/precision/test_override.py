"""Overrides of a recipe's fields: nested changes, what they leave alone, and what is refused with its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E4M3, E5M2, NEAREST
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.estimators import DifferentiableEstimator, StraightThrough
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import SavedInput, override
from lowprec_train.recipes import (
    bf16,
    fp4,
    fp4_fold,
    fp4_mixed,
    fp8,
    fp8_block,
    mxfp4,
    nvfp4,
    quartet2,
)
from lowprec_train.tools.study import definition
from tests.precision import layers
from tests.precision.test_recipe import ALL, CODES


@pytest.mark.parametrize("name", ALL)
def test_no_change_is_no_change(name):
    recipe = ALL[name]()
    assert override(recipe, {}) == recipe
    assert override(recipe, {"dgrad": {}, "wgrad": {}}) == recipe


E2M1_ALONE = ("nvfp4", "quartet2", "fp4_fold", "fp8_eden4")  # under scales of no other format


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("bf16", *E2M1_ALONE)])
def test_an_override_and_its_reverse(name):
    recipe = ALL[name]()
    was = recipe.dgrad.a
    other = E5M2 if was.format is E4M3 else E4M3
    there = override(recipe, {"dgrad": {"a": {"format": other.name}}})
    assert there != recipe and there.dgrad.a == replace(was, format=other)
    assert (there.fprop, there.wgrad, there.dgrad.b) == (recipe.fprop, recipe.wgrad, recipe.dgrad.b)
    assert override(there, {"dgrad": {"a": {"format": was.format.name}}}) == recipe


def test_every_kind_of_value():
    mx, four = mxfp4.recipe(), fp4.recipe()
    assert override(mx, {"wgrad": {"rotation": {"block": 32}}}).wgrad.rotation == RandomHadamard(32)
    assert override(mx, {"wgrad": {"rotation": None}}).wgrad.rotation is None
    assert override(mx, {"wgrad": {"a": {"tile": [1, 64]}}}).wgrad.a.tile == (1, 64)
    assert override(mx, {"wgrad": {"a": {"rounding": "nearest"}}}).wgrad.a.rounding is NEAREST
    assert override(mx, {"dgrad": {"b": {"scale": "E8M0_CEIL"}}}).dgrad.b.scale is ScaleRule.E8M0_CEIL
    assert override(mx, {"dgrad": {"split_accumulation": False}}).dgrad.split_accumulation is False
    bare = override(fp4_fold.recipe(), {"dgrad": {"a": {"candidates": "none", "correction": "NONE"}}}).dgrad.a
    assert bare.candidates is Candidates.NONE and bare.correction is Correction.NONE
    assert override(four, {"estimator": None}).estimator == StraightThrough()
    assert override(four, {"estimator": {"k": 3.0}}).estimator == DifferentiableEstimator(k=3.0, cap=3.0)
    assert override(four, {"fprop": {"outliers": None}}).fprop.outliers is None
    assert override(four, {"fprop": {"outliers": {"variant": "residual"}}}) == fp4.recipe(outliers="residual")
    assert override(four, {"fprop": {"outliers": {"quantile": 0.97}}}) == fp4.recipe(alpha=0.97)
    plain = override(bf16.recipe(), {"fprop": {"a": {"format": "E4M3", "scale": "POW2"}}})
    assert plain.fprop.a == Quantizer(E4M3, scale=ScaleRule.POW2) and plain.fprop.b is None


def test_overrides_of_what_is_kept_and_rotated():
    nv, block, mixed = nvfp4.recipe(), fp8_block.recipe(), fp4_mixed.feed_forward()
    assert override(nv, {"wgrad": {"rotation": None}}) == nvfp4.recipe(rotation=0)
    assert override(nv, {"wgrad": {"rotation": {"block": 32}}}) == nvfp4.recipe(rotation=32)
    nearest = {"a": {"rounding": "nearest"}}
    assert override(nv, {"dgrad": nearest, "wgrad": nearest}) == nvfp4.recipe(stochastic=False)
    assert override(nv, {"dgrad": {"a": {"headroom": 1.0}}}).dgrad.a.range_share == 1
    assert override(block, {"saved_input": "INPUT"}) == replace(block, saved_input=SavedInput.INPUT)
    assert override(override(block, {"saved_input": "input"}), {"saved_input": "OPERAND"}) == block
    assert override(block, {"saved_input": "CODES"}).saves_codes
    assert not override(quartet2.recipe(), {"weight_from_codes": False}).weight_from_codes
    assert override(block, {"fprop": {"codes_only": True}}).fprop == replace(block.fprop, codes_only=True)
    assert override(mixed, {"dgrad": {"b": "fprop_codes"}}).dgrad.b is CODES
    own = override(block, {"dgrad": {"b": {"format": "E4M3", "tile": [128, 128], "scale": "POW2"}}})
    assert own.dgrad.b == block.fprop.b


@pytest.mark.parametrize("name", ["fp8", "int8_switchback", "nvfp4"])
def test_a_reused_operand_can_be_left_unquantised(name):
    """16-bit dX in one line: precision.override.dgrad.a=null, dgrad.b=null."""
    recipe = ALL[name]()
    assert override(recipe, {"dgrad": {"a": None, "b": None}}) == replace(
        recipe, dgrad=replace(recipe.dgrad, a=None, b=None)
    )


def test_the_original_is_untouched():
    recipe = fp4.recipe()
    override(recipe, {"dgrad": {"a": {"format": "E4M3"}}})
    assert recipe == fp4.recipe()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"bgrad": {"a": None}}, ("bgrad", "fprop, dgrad, wgrad")),
        ({"dgrad": {"c": None}}, ("dgrad.c",)),
        ({"dgrad": {"a": {"fromat": "E4M3"}}}, ("dgrad.a.fromat", "format")),
        ({"dgrad": {"a": {"format": "E9M9"}}}, ("E9M9", "E4M3")),
        ({"dgrad": {"a": {"scale": "OCP"}}}, ("dgrad.a.scale", "OCP", "E8M0_CEIL")),
        ({"dgrad": 3}, ("dgrad", "3")),
        ({"fprop": {"outliers": {"variant": "sparse"}}}, ("fprop.outliers", "sparse")),
        ({"fprop": {"outliers": {"quantile": 0.1}}}, ("fprop.outliers", "0.1")),
        ({"dgrad": {"rotation": {"block": 33}}}, ("dgrad.rotation", "33")),
        ({"dgrad": {"a": {"tile": [0, 1]}}}, ("dgrad.a", "0")),
        ({"estimator": {"k": 0}}, ("estimator", "0")),
        ({"estimator": {"q": 0}}, ("estimator.q", "k")),
        ({"fprop": {"b": None}}, ("fprop",)),
    ],
)
def test_wrong_overrides_name_their_place(changes, said):
    with pytest.raises(ValueError) as error:
        override(fp4.recipe(), changes)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("nvfp4", {"dgrad": {"a": {"format": "E4M3"}}}, ("dgrad.a", "NVFP4", "E4M3")),
        ("nvfp4", {"wgrad": {"b": None}}, ("wgrad", "rotation")),
        ("nvfp4", {"wgrad": {"b": None, "rotation": None}}, ("operand",)),
        ("nvfp4", {"wgrad": {"b": "fprop_codes"}}, ("wgrad", "rotat")),
        ("nvfp4", {"saved_input": "NOTHING"}, ("saved_input", "NOTHING", "OPERAND")),
        ("nvfp4", {"dgrad": {"codes_only": True}}, ("codes_only",)),
        ("fp8_block", {"wgrad": {"a": None}}, ("operand",)),
        ("fp8_block", {"fprop": {"b": None}}, ("dgrad",)),
        ("fp8_rowwise", {"saved_input": "CODES", "fprop": {"a": None}}, ("fprop",)),
        ("fp8_rowwise", {"wgrad": {"a": {"exponent_span": 3, "scale": "FP32"}}}, ("wgrad.a", "span")),
        ("int8_switchback", {"saved_input": "OPERAND"}, ("operand",)),
        ("int8_switchback", {"estimator": {"k": 5.0}}, ("estimator",)),
        ("fp4_mixed", {"fprop": {"outliers": {"quantile": 0.99}}}, ("outlier", "1x128")),
    ],
)
def test_overrides_that_contradict_the_recipe(name, changes, said):
    with pytest.raises(ValueError) as error:
        override(ALL[name](), changes)
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"wgrad": {"a": {"rounding": "maybe"}}},
        {"wgrad": {"split_accumulation": "maybe"}},
        {"wgrad": {"a": {"exponent_span": "wide"}}},
        {"wgrad": {"a": {"tile": [1, 32, 1]}}},
        {"wgrad": {"a": {"tile": "row"}}},
    ],
)
def test_values_of_another_type_are_refused(changes):
    with pytest.raises(ValueError, match="wgrad"):
        override(mxfp4.recipe(), changes)


@pytest.mark.parametrize(
    ("arm", "of_fp8"), [("fp8_forward", (True, False, False)), ("fp8_backward", (False, True, True))]
)
def test_half_of_fp8(arm, of_fp8):
    """Arms of the study fp8_parts: each of Y, dX and dW is that of an `fp8` layer or of a BF16 layer."""
    changes = OmegaConf.from_dotlist(list(definition.load(definition.find(Path("fp8_parts"))).arms[arm].overrides))
    x, w, dy = layers.make(layers.heavy_tails, "BF16")
    half = override(fp8.recipe(), OmegaConf.to_container(changes)["precision"]["override"])
    got, eight, sixteen = (
        layers.run(layers.linear(recipe, w), x, dy, "BF16") for recipe in (half, fp8.recipe(), bf16.recipe())
    )
    for mine, low, high, quantised in zip(got, eight, sixteen, of_fp8, strict=True):
        assert torch.equal(mine, low if quantised else high) and not torch.equal(low, high)
