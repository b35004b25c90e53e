"""What a plan says before anything runs: sources, ops, what ranks may share, and what is saved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowprec_train.numerics.draws import Operand
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, FP16
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision import gemm
from lowprec_train.precision.estimators import DifferentiableEstimator
from lowprec_train.precision.linear import PLAN_CACHE_SIZE, Linear
from lowprec_train.precision.linear_plan import LinearPlan, Op, Source
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput, override
from lowprec_train.precision.split import Split
from tests.recipes import RECIPES

CPU, N, K, TOKENS = torch.device("cpu"), 256, 384, 512
TENSOR, ROW, LINE = (Quantizer(E4M3, tile, ScaleRule.POW2) for tile in ((-1, -1), (1, -1), (1, 32)))


class Two:
    """The size of a group; a plan asks for no more."""

    size, rank = 2, 0


def plan(recipe: LinearRecipe, dim: int | None = None, **how) -> LinearPlan:
    """Of a layer of N x K, or of one of two parts of it."""
    shape = (N // 2 if dim == 0 else N, K // 2 if dim == 1 else K)
    split = None if dim is None else Split(dim=dim, whole=(N, K)[dim], group=Two())
    return compile_plan(recipe, shape, TOKENS, CPU, split=split, **how)


def ops(plan: LinearPlan) -> dict[str, Op]:
    return {operand.name: operand.op for operand in plan.operands()}


@pytest.mark.parametrize("name", RECIPES)
def test_an_observer_has_every_operand_by_an_op_of_its_own(name):
    watched = plan(RECIPES[name], fused=False)
    assert set(ops(watched).values()) <= {Op.NONE, Op.QUANTIZE, Op.QUANTIZE_OUTLIERS}
    assert watched.paths() == plan(RECIPES[name]).paths()
    assert not plan(RECIPES[name], 0, fused=False).gathers_rows


@pytest.mark.parametrize("name", RECIPES)
def test_a_part_has_the_shape_of_the_whole_and_its_own_sizes(name):
    for dim in (0, 1):
        part = plan(RECIPES[name], dim)
        n, k = (N // 2, K) if dim == 0 else (N, K // 2)
        assert part.shape == (N, K) and [each.sizes for each in part.gemms().values()] == [
            (TOKENS, n, k),
            (TOKENS, k, n),
            (n, k, TOKENS),
        ]
        cuts = {operand.name: operand.cut for operand in part.operands()}
        want = {"X": None, "W": 0, "dY": 1, "W^T": 1, "dY^T": 0, "X^T": None}
        want = want if dim == 0 else {"X": 1, "W": 1, "dY": None, "W^T": 0, "dY^T": None, "X^T": 0}
        assert cuts == want


def dy(first: Quantizer, second: Quantizer, dim: int | None, w: Quantizer = TENSOR) -> bool:
    """Whether one op rounds dY for dgrad and for wgrad. w: rounds W, and is reused in dgrad."""
    reusing = Gemm(a=first, b=Reuse.FPROP_CODES)
    recipe = LinearRecipe(fprop=Gemm(a=TENSOR, b=w), dgrad=reusing, wgrad=Gemm(a=second, b=Reuse.FPROP_CODES))
    return plan(recipe, dim).dgrad.a.op is Op.QUANTIZE_BOTH


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_when_one_op_rounds_both_orientations_of_a_part(dim):
    """dim 0 cuts dY's columns: rows of dY then lie on several ranks, and rows of dY^T on one. dim 1 leaves dY whole."""
    alone = dim != 0
    assert dy(TENSOR, TENSOR, dim) == (dim != 1)  # one number for everything; dim 1 gathers codes for both GEMMs
    assert dy(LINE, LINE, dim)  # no number of other ranks
    assert dy(ROW, ROW, dim) == dy(TENSOR, ROW, dim) == dy(ROW, TENSOR, dim) == alone
    assert dy(ROW.transposed(), ROW, dim)  # columns of dY, one a row of dY^T
    assert dy(TENSOR, TENSOR, dim, w=ROW) == alone  # row scales of W go into dY, whose amax then is another
    assert not dy(TENSOR, Quantizer(E5M2, scale=ScaleRule.POW2), dim)


def test_an_amax_that_was_left_is_used_for_one_scale_of_what_is_not_changed_first():
    ops_around = {"producer": "gated_silu", "consumer": "quantized_gated_silu"}
    for name, recipe in RECIPES.items():
        found = plan(recipe, **ops_around)
        of_x = name in ("fp8", "w4a8", "mxfp4_fp8", "fp8_eden4", "reduced_mantissa")
        assert found.fprop.a.amax_from == ("gated_silu" if of_x else "")
        assert found.dgrad.a.amax_from == ("quantized_gated_silu" if name in ("fp8", "fp4_mixed") else "")
        assert not found.dgrad.a.codes_from
    column, row = (plan(RECIPES["fp8"], dim, **ops_around) for dim in (0, 1))
    assert not column.fprop.a.amax_from and column.dgrad.a.amax_from  # X is this rank's rows
    assert row.fprop.a.amax_from and not row.dgrad.a.amax_from


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_rotary_positions_comes_with_codes_of_fold3_and_never_with_an_amax(name):
    found = plan(RECIPES[name], consumer="rotary").dgrad.a
    assert found.codes_from == ("rotary_backward_ladder" if name in ("fp4_fold", "fp8_eden4") else "")
    assert not found.amax_from


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_swiglu_comes_with_codes_of_fold3(name):
    """Rows of a part of dY's columns (dim 0) have their scales from all ranks."""
    op = "gated_silu_backward_ladder" if name in ("fp4_fold", "fp8_eden4") else ""
    found = plan(RECIPES[name], consumer="gated_silu")
    assert found.dgrad.a.codes_from == op and ("codes from gated_silu" in str(found.dgrad.a)) == bool(op)
    for other in (plan(RECIPES[name], 0, consumer="gated_silu"), plan(RECIPES[name], consumer="quantized_gated_silu")):
        assert not other.dgrad.a.codes_from
    if op:
        averaged = plan(replace(RECIPES[name], mean_split=True), consumer="gated_silu")
        assert averaged.dgrad.a.mean_split and not averaged.dgrad.a.codes_from


@pytest.mark.parametrize("name", RECIPES)
def test_dy_is_gathered_as_codes_if_both_gemms_share_them_and_nothing_else_needs_dy(name):
    found = plan(RECIPES[name], 1)
    assert found.gathers_dy == (name in ("fp8", "fp4_mixed"))
    if found.gathers_dy:
        assert found.wgrad.a.source is Source.DGRAD_CODES and ops(found)["dY"] is Op.QUANTIZE
        assert found.paths() == plan(RECIPES[name]).paths()
    assert not plan(RECIPES[name], 1, fused=False).gathers_dy
    assert not plan(RECIPES[name], 0).gathers_dy and not plan(RECIPES[name]).gathers_dy


def test_dy_is_gathered_in_bf16_if_more_than_its_codes_is_needed():
    """Outliers of X and means are multiplied with dY itself; FP16 codes are no smaller than BF16."""
    fp8, clamped = RECIPES["fp8"], Gemm(a=Quantizer(E2M1, (1, -1)), b=TENSOR, outliers=OutlierClamp(0.99, "residual"))
    wide, fresh = Quantizer(FP16, scale=ScaleRule.POW2), Gemm(a=TENSOR, b=TENSOR)
    others = [
        LinearRecipe(fprop=clamped, dgrad=fresh, wgrad=fresh, saved_input=SavedInput.CODES),
        replace(fp8, mean_split=True),
        replace(fp8, dgrad=replace(fp8.dgrad, a=wide), wgrad=replace(fp8.wgrad, a=wide)),
    ]
    assert plan(fp8, 1).gathers_dy and not any(plan(each, 1).gathers_dy for each in others)
    assert plan(replace(others[0], fprop=fresh, saved_input=SavedInput.INPUT), 1).gathers_dy


@pytest.mark.parametrize("name", RECIPES)
def test_gathered_codes_are_saved_as_they_came(name):
    if RECIPES[name].dgrad.b is not Reuse.FPROP_CODES and not RECIPES[name].weight_from_codes:
        return
    found = plan(RECIPES[name], gathered=True)
    assert found.fprop.b.source is Source.ALL_GATHERED and found.fprop.b.op is Op.NONE and found.straight_through
    assert found.saved_w is not None and not (found.saved_w.packed or found.saved_w.transposed)


def test_rows_on_the_ladder_are_gathered_as_carriers_or_not_at_all():
    """Codes under scales of blocks would come with the blocks of one rank: the estimator's slope asks for these."""
    folded = RECIPES["fp4_fold"]
    assert plan(folded, 0).fprop.a.source is Source.ALL_GATHERED and plan(folded, 0).fprop.a.op is Op.ROTATE_FOLD
    sloped = plan(replace(folded, estimator=DifferentiableEstimator()), 0).fprop.a
    assert (sloped.source, sloped.op) == (Source.FRESH, Op.QUANTIZE)


def test_codes_are_packed_where_two_make_a_byte():
    nvfp4 = RECIPES["nvfp4"]
    assert plan(nvfp4).saved_x.packed and compile_plan(nvfp4, (N, K), TOKENS + 1, CPU).saved_x.packed is False
    odd = compile_plan(RECIPES["fp4_unclamped"], (N, K + 1), TOKENS, CPU)
    assert plan(RECIPES["fp4_unclamped"]).saved_x.packed and not odd.saved_x.packed


def test_only_e2m1_blocks_fold(monkeypatch):
    """A span bounds exponents of any format; codes of more than three bits times 2**-span are no FP8 numbers."""
    monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 9))
    for format, path in ((E2M1, "fp8_folded"), (E4M3, "dequantize")):
        block = Quantizer(format, (1, 32), ScaleRule.POW2, exponent_span=14)
        assert plan(LinearRecipe(fprop=Gemm(a=block, b=block))).paths()["fprop"] == path


def test_the_folding_op_decodes_codes_of_one_scale_only():
    """It takes X in E4M3 under one number; rows with scales of their own are decoded before."""
    one, rows = RECIPES["mxfp4_fp8"], override(RECIPES["mxfp4_fp8"], {"fprop": {"a": {"tile": [1, -1]}}})
    assert plan(one).wgrad.b.op is Op.ROTATE_FOLD and plan(rows).wgrad.b.op is Op.QUANTIZE
    assert plan(one, dtype=torch.float32).wgrad.b.op is Op.QUANTIZE


def test_what_only_a_gemm_in_bf16_takes_is_made_as_values():
    """Not X whose codes are kept, not W, nothing with maxima of its own, nothing of a matrix cut under one scale."""
    by_hand, folded = RECIPES["nvfp4"], {"fprop": {"a": {"candidates": "mse"}}}
    rounds = {name for name, op in ops(plan(by_hand)).items() if op is Op.ROUND}
    assert rounds == {"X", "dY", "dY^T"} and plan(by_hand).wgrad.b.source is Source.FORWARD
    assert {name for name, op in ops(plan(override(by_hand, folded))).items() if op is Op.ROUND} == {"dY", "dY^T"}
    assert {name for name, op in ops(plan(RECIPES["quartet2"])).items() if op is Op.ROUND} == {
        "dY",
        "W^T",
        "dY^T",
        "X^T",
    }
    assert Op.ROUND not in {plan(by_hand, 0).dgrad.a.op, plan(by_hand, 0).wgrad.a.op}
    assert plan(RECIPES["quartet2"], 0).dgrad.a.op is Op.ROUND


def test_what_the_table_says():
    told = plan(RECIPES["fp8_block"]).describe()
    assert told["wgrad"]["X^T"] == "rounded in the forward pass, quantize_both (X and X^T)"
    assert told["fprop"]["X"] == "fresh, quantize_both (X and X^T); saved: codes of the transpose"
    assert list(told["dgrad"]) == ["dY", "W^T"]
    assert plan(RECIPES["fp8"], 0).describe()["fprop"]["X"].startswith("all-gathered codes, quantize")
    assert [o.operand for o in plan(RECIPES["bf16"]).operands()] == [Operand.A, Operand.B] * 3


def test_a_layer_holds_its_last_plans():
    layer = Linear(64, 32, bias=False)
    layer.recipe = RECIPES["fp8"]
    first, *others = (layer.plan(tokens, torch.bfloat16, CPU) for tokens in range(1, PLAN_CACHE_SIZE + 1))
    assert layer.plan(1, torch.bfloat16, CPU) is first
    layer.plan(PLAN_CACHE_SIZE + 1, torch.bfloat16, CPU)
    assert layer.plan(2, torch.bfloat16, CPU) is others[0] and layer.plan(1, torch.bfloat16, CPU) is not first
    layer.recipe = RECIPES["fp4"]
    assert layer.plan(2, torch.bfloat16, CPU).fprop != others[0].fprop
