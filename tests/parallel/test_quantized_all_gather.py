"""Weights gathered in BF16 and as codes: the bits of gathering them as they are stored, in fewer bytes.

Equal bits of losses and of every gradient, over steps with an evaluation in between, are claimed for each recipe but
one kind: where codes go with a differentiable estimator, its slope is multiplied into the sum of the gradients. Then
the gradient is that slope times the straight-through gradient, bit for bit, and differs from the sum of the products by
the roundings of n products and sums in another place: (n + 1) 2^-24 for each of n contributions.
"""

import pytest
import torch

from lowprec_train.numerics.formats import E2M1, E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.parallel.all_gather_format import all_gather_format
from lowprec_train.precision.all_gathered_weight import weight_codes
from lowprec_train.precision.recipe import override
from tests.parallel.all_gather_runs import AT, CASES, ESTIMATED, NIGHT, PARTS, STEPS, launched
from tests.recipes import RECIPES

CODED = {"fp8", "fp8_block", "fp4", "fp4_unclamped", "nvfp4", "int8_switchback", "quartet2", "w4a8"}
BOUND = 15 * 2.0**-24  # of a gradient's norm: five roundings, where four contributions cancel to a third of their size


@pytest.fixture(scope="module")
def pair(once):
    """What each of two ranks saw; started once."""
    return once("gather-dp2", lambda: launched("dp2"))


@pytest.fixture(scope="module")
def square(once):
    """The same of two times two ranks, tensor parallel in pairs."""
    return once("gather-dp2-tp2", lambda: launched("dp2-tp2"))


@pytest.fixture
def seen(request):
    """case -> what each of two ranks saw of it."""
    return lambda case: request.getfixturevalue("night" if case in NIGHT else "pair")


@pytest.fixture(scope="module")
def night(once):
    """What the cases of the night saw."""
    return once("gather-night", lambda: launched("dp2 night"))


def timed(cases):
    """Those of the night marked so."""
    return [pytest.param(case, marks=pytest.mark.nightly) if case in NIGHT else case for case in cases]


def differing(found, expected):
    """Steps and names of the gradients that are not the same bits."""
    pairs = zip(found["gradients"], expected["gradients"], strict=True)
    return [(step, name) for step, (a, b) in enumerate(pairs) for name in b if not torch.equal(a[name], b[name])]


def same(ranks, case, gather):
    for each in ranks:
        found, expected = each[case, gather], each[case, "fp32"]
        assert found["loss"] == expected["loss"] and len(found["loss"]) == STEPS
        assert found["valid"] == expected["valid"]
        assert not differing(found, expected)
        assert found["dtypes"] == {torch.float32}
        assert found["loss"][-1] < found["loss"][0], "the weights move"


@pytest.mark.parametrize("case", timed(CASES))
def test_bf16_is_what_is_stored(seen, case):
    same(seen(case), case, "bf16")


@pytest.mark.parametrize("case", timed(case for case in CASES if case not in ESTIMATED))
def test_codes_are_what_is_stored(seen, case):
    same(seen(case), case, "quantized")


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_parts(square, case):
    same(square, case, "bf16")
    if case in ESTIMATED:
        close(square, case)
    else:
        same(square, case, "quantized")


def close(ranks, case):
    """Gradients of the first step, of equal weights; then what Adam makes of a relative 1e-7."""
    for each in ranks:
        found, expected = each[case, "quantized"], each[case, "fp32"]
        for name, gradient in found["gradients"][0].items():
            error = (gradient - expected["gradients"][0][name]).norm()
            assert error <= BOUND * gradient.norm(), name
        assert found["loss"] == pytest.approx(expected["loss"], rel=BOUND)
        assert found["valid"] == pytest.approx(expected["valid"], rel=BOUND)
        assert found["dtypes"] == {torch.float32}


@pytest.mark.parametrize("case", timed(ESTIMATED))
def test_codes_with_an_estimator(seen, case):
    close(seen(case), case)


def test_the_slope_of_the_sum(pair):
    """f'(W / s) * sum(g), with g of the straight-through recipe: the same weights, and the same codes of them."""
    found, straight = pair[0]["fp4", "quantized"], pair[0]["straight", "quantized"]
    how = RECIPES["fp4"]
    slopes = 0
    for name, gradient in found["gradients"][0].items():
        expected = straight["gradients"][0][name]
        if name.removesuffix(".weight") in found["wires"] and name.startswith("blocks."):
            w = found["first"][name].to(torch.bfloat16)
            expected = how.estimator(expected, w, how.fprop.b(w).scale, torch.float32)
            slopes += 1
        assert torch.equal(gradient, expected), name
    assert slopes == 8


def test_what_travelled(pair):
    """Bytes that a rank put into the first step's gathers, by dtype: as `wire` says, a head once a micro-batch."""
    for case in ("fp8", "fp4", "nvfp4", "fp4_mixed", "fp8_rowwise", "each"):
        master, bf16, codes = (pair[0][case, gather]["sent"][0] for gather in ("fp32", "bf16", "quantized"))
        assert set(master) == {torch.float32} and set(bf16) == {torch.float32, torch.bfloat16}
        embedding = bf16[torch.float32]
        assert bf16[torch.bfloat16] == (master[torch.float32] - embedding) / 2
        wires = pair[0][case, "quantized"]["wires"]
        blocks, head = 4 * sum(size for name, size in wires.items() if name != "head"), 2 * wires["head"]
        assert codes[torch.float32] == embedding
        assert codes.get(torch.uint8, 0) + codes[torch.bfloat16] == blocks + head, case
    fp8, fp4 = (pair[0][case, "quantized"]["sent"][0][torch.uint8] for case in ("fp8", "fp4"))
    numbers = pair[0]["fp8", "bf16"]["sent"][0][torch.bfloat16] // 2 - 2 * 64 * 128 // 2
    assert fp8 == numbers, "a byte a number: the scale is known"
    assert numbers / 2 < fp4 < 0.55 * numbers, "half a byte, and four a row"


def test_a_run_says_what_travels(pair):
    """What run.json will hold of each layer."""
    assert pair[0]["fp4", "fp32"]["gathered"] == {}
    assert set(pair[0]["fp4", "bf16"]["gathered"].values()) == {"bfloat16, 2 bytes a number"}
    down = {recipe: pair[0][recipe, "quantized"]["gathered"]["blocks.0.mlp.down"] for recipe in ("fp4", "fp8")}
    assert down["fp4"].startswith("codes E2M1") and " 0.5" in down["fp4"]
    assert down["fp8"].startswith("codes E4M3") and down["fp8"].endswith(", 1 bytes a number")


def test_a_phase_changes_what_travels(pair):
    """fp4_mixed: FP8 codes of attention until the last step, which is BF16 throughout; evaluated before and after."""
    for case, gathers in (("fp4_mixed", 4), ("zero2", 2)):
        first, second, last = (each.get(torch.uint8, 0) for each in pair[0][case, "quantized"]["sent"])
        assert first == second, "units that mix codes and values travel as bytes"
        assert last == first / gathers, "those of the evaluation before the last step; those of the step as BF16"


def test_one_agreement_a_step(pair, square):
    """Maxima of all weights in one all-reduce for each axis that cuts them, before each step and each evaluation."""
    prepared = STEPS + STEPS - 1
    assert len(pair[0]["fp8", "quantized"]["agreements"]) == prepared
    assert len(pair[0]["fp4", "quantized"]["agreements"]) == 0, "rows are whole"
    assert len(pair[0]["fp8", "bf16"]["agreements"]) == 0
    assert len(square[0]["fp8", "quantized"]["agreements"]) == 2 * prepared
    assert len(square[0]["fp4", "quantized"]["agreements"]) == prepared, "row-parallel rows lie on both ranks"


@pytest.mark.parametrize("case", ["fp8", "fp4", "nvfp4", "each"])
@pytest.mark.parametrize("gather", ["bf16", "quantized"])
def test_a_weight_is_rounded_once_a_step(pair, case, gather):
    """And once for an evaluation, whatever the micro-batches, the passes and the gathers."""
    counts = pair[0][case, gather]["rounded"]
    assert counts and set(counts.values()) == {2 * STEPS - 1}, counts


def test_gradients_are_given_as_they_are_made(pair):
    """BF16 of plain products, FP32 of others."""
    for gather in ("bf16", "quantized"):
        assert set(pair[0]["bf16", gather]["given"].values()) == {torch.bfloat16}
        fp8 = pair[0]["fp8", gather]["given"]
        assert {dtype for name, dtype in fp8.items() if name != "head"} == {torch.float32}
        assert fp8["head"] is torch.bfloat16


def test_telemetry_sees_the_codes(pair):
    """Of the weight, this rank's part, where it is rounded."""
    stored, codes = pair[0]["watched", "fp32"]["rows"], pair[0]["watched", "quantized"]["rows"]
    assert codes == stored and ("blocks.0.mlp.down", "fprop", "b") in codes


@pytest.mark.parametrize("case", timed(["compiled", "compiled fp4"]))
def test_blocks_share_a_graph(seen, case):
    counts = {gather: seen(case)[0][case, gather]["graphs"] for gather in ("fp32", "bf16", "quantized")}
    assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize("case", timed(["compiled", "compiled fp4"]))
def test_no_transposed_weight_is_saved(seen, case):
    """The backward pass transposes gathered codes. In the forward pass a compiler would save the result."""
    result = seen(case)[0][case, "quantized"]
    matrices = {x.shape for name, x in result["first"].items() if x.ndim == 2 and name.startswith("blocks.")}
    assert any((torch.float8_e4m3fn, shape) in result["saved"] for shape in matrices)
    shapes = {torch.Size(shape[::-1]) for shape in matrices} - matrices
    assert shapes and not {(torch.float8_e4m3fn, shape) for shape in shapes} & result["saved"]


def test_all_ranks_agree(pair, square):
    for ranks, at in ((pair, "dp2"), (square, "dp2-tp2")):
        for case in AT[at]:
            for gather in ("fp32", "bf16", "quantized"):
                assert all(each[case, gather]["loss"] == ranks[0][case, gather]["loss"] for each in ranks)


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_which_recipes_take_codes(recipe):
    """Those whose every GEMM takes the weight as fprop's codes."""
    assert (weight_codes(RECIPES[recipe]) is not None) == (recipe in CODED)
    form = all_gather_format(RECIPES[recipe], (512, 256), shards=2, param_all_gather="quantized")
    assert (form.quantizer is not None) == (recipe in CODED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_auto_takes_codes_that_change_no_bit(recipe):
    """An estimator's slope would be multiplied into gradients elsewhere."""
    form = all_gather_format(RECIPES[recipe], (512, 256), shards=2, param_all_gather="auto")
    assert (form.quantizer is not None) == (recipe in CODED - {"fp4", "fp4_unclamped"})
    straight = override(RECIPES["fp4"], {"estimator": None})
    assert all_gather_format(straight, (512, 256), shards=2, param_all_gather="auto").quantizer is not None


def test_stochastic_weights_stay_values():
    """Their draws are addressed by the layer, and made in it."""
    assert weight_codes(override(RECIPES["fp4"], {"fprop": {"b": {"rounding": "stochastic"}}})) is None


@pytest.mark.parametrize(
    ("recipe", "shape", "shards", "sent"),
    [
        ("fp8", (512, 256), 2, 256 * 256),
        ("fp8_block", (512, 256), 2, 256 * 256 + 4 * 2 * 2),
        ("fp4", (512, 256), 2, 256 * 128 + 4 * 256),
        ("nvfp4", (512, 256), 2, 256 * 128 + 16 * 16),
        ("quartet2", (512, 256), 2, 256 * 128 + 256 * 16),
        ("w4a8", (512, 256), 2, 256 * 128 + 4 * 256 * 8),
        ("int8_switchback", (512, 256), 4, 128 * 256),
        ("fp8_block", (512, 256), 8, 2 * 64 * 256),  # a 128x128 tile would lie on two ranks
        ("fp8", (510, 256), 4, 2 * 128 * 256),  # parts of different sizes
        ("fp8", (512, 256), 1, 2 * 512 * 256),  # nothing to send
        ("mxfp4", (512, 256), 2, 2 * 256 * 256),
        ("bf16", (512, 256), 2, 2 * 256 * 256),
        (None, (512, 256), 2, 4 * 256 * 256),
    ],
)
def test_bytes_of_a_part(recipe, shape, shards, sent):
    form = all_gather_format(RECIPES.get(recipe), shape, shards=shards, param_all_gather="quantized")
    assert form.bytes == sent
    assert (
        all_gather_format(RECIPES.get(recipe), shape, shards=shards, param_all_gather="fp32").bytes
        == 4 * form.rows * form.columns
    )


@pytest.mark.parametrize(
    ("how", "split", "coded"),
    [
        (Quantizer(E4M3), 0, True),
        (Quantizer(E4M3), 1, True),
        (Quantizer(E2M1, tile=(1, -1)), 1, True),  # rows' maxima over tp
        (Quantizer(E2M1, tile=(-1, 1)), 1, True),  # columns' over dp_shard
        (Quantizer(E2M1, tile=(16, 16), scale=ScaleRule.NVFP4), 1, True),
        (Quantizer(E2M1, tile=(-1, 16), scale=ScaleRule.NVFP4), None, True),
        (Quantizer(E2M1, tile=(-1, 16), scale=ScaleRule.NVFP4), 1, False),  # columns' first, then the tensor's
        (Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL, exponent_span=14), 1, True),
        (Quantizer(E2M1, tile=(-1, 32), scale=ScaleRule.E8M0_CEIL, exponent_span=14), 1, False),
    ],
)
def test_one_maximum_must_do(how, split, coded):
    """Where codes would need two rounds of agreement, values travel."""
    recipe = override(RECIPES["fp4"], {"estimator": None})
    recipe = type(recipe)(fprop=type(recipe.fprop)(a=recipe.fprop.a, b=how), dgrad=recipe.dgrad, wgrad=recipe.wgrad)
    assert (
        all_gather_format(recipe, (64, 64), shards=2, param_all_gather="quantized", split=split).quantizer is not None
    ) == coded


def test_says_what_travels():
    assert (
        str(all_gather_format(RECIPES["fp8"], (64, 64), shards=2, param_all_gather="quantized"))
        == "codes E4M3[*x*] POW2, 1 bytes a number"
    )
    assert (
        str(all_gather_format(RECIPES["mxfp4"], (64, 64), shards=2, param_all_gather="quantized"))
        == "bfloat16, 2 bytes a number"
    )
