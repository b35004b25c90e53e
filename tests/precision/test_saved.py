"""What lies between forward and backward: how many bytes, which codes, and that they are the ones the GEMMs multiply.

M tokens, K in, N out. Bytes are counted by autograd's own hooks, by dtype; expectations follow from the shapes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Quantized
from lowprec_train.ops.ladder import SPAN
from lowprec_train.precision import gemm, linear_gemms
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe, Reuse, override
from lowprec_train.recipes import fp4_fold, fp4_mixed, fp8_block, fp8_eden4, mxfp4, mxfp4_fp8, mxfp8, nvfp4
from tests.oracle import TABLES, bf16, quantize, random_bits, rotate_float32, tiles
from tests.oracle_linear import ROTATION, WGRAD, B
from tests.oracle_recipes import unpacked
from tests.precision.layers import DATA, FIRST_TOKEN, heavy_tails, linear, make, outlier_channels, run, seeds
from tests.recipes import RECIPES

M, K, N = 256, 384, 128
SIZES = (M, K, N)
CLIPPED = 3  # floor((1 - 0.99) K) on either side of a token
BF16, F32, E4M3, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8

BYTES: dict[str, dict[torch.dtype, int]] = {
    "bf16": {BF16: 2 * M * K + 2 * N * K},
    "fp8": {E4M3: M * K + N * K, F32: 4 + 4},
    "fp8_rowwise": {BF16: 2 * M * K},
    "fp8_block": {E4M3: M * K + N * K, F32: 4 * K * (M // 128) + 4 * (N // 128) * (K // 128)},
    "mxfp8": {E4M3: M * K, F32: 4 * K * (M // 32)},
    "fp4": {E4M3: M * K + N * K, F32: 4 * M + 4 * N},
    "fp4_residual": {U8: M * K // 2, E4M3: N * K, F32: 4 * M + 4 * N + 4 * M * 2 * CLIPPED},
    "fp4_unclamped": {U8: M * K // 2, E4M3: N * K, F32: 4 * M + 4 * N},
    "fp4_mixed": {E4M3: M * K, F32: 4},
    "mxfp4": {BF16: 2 * M * K},
    "mxfp4_fp8": {E4M3: M * K, F32: 4},
    "fp4_fold": {E4M3: M * K, F32: 4 * M},
    "fp8_eden4": {E4M3: M * K, F32: 4},
    "nvfp4": {U8: M * K // 2 + N * K // 2, E4M3: K * (M // 16) + (N // 16) * (K // 16), F32: 4 + 4},
    "nvfp4_lines": {U8: M * K // 2, E4M3: K * (M // 16), F32: 4},
    "quartet2": {U8: M * K // 2 + N * K // 2, E4M3: M * (K // 16) + N * (K // 16), F32: 4 + 4},
    "ufp4": {E4M3: M * K, F32: 4 * K * (M // 16)},
    "reduced_mantissa": {BF16: 2 * M * K},
    "w4a8": {E4M3: M * K, U8: N * K // 2, F32: 4 + 4 * N * (K // 32)},
    "averis": {U8: M * K // 2 + N * K // 2, E4M3: K * (M // 16) + (N // 16) * (K // 16), F32: 4 + 4 + 4 * K},
    "int8_switchback": {BF16: 2 * M * K, torch.int8: N * K, F32: 4},
}
BYTES["fp4_residual"][torch.int64] = 8 * M * 2 * CLIPPED


def saved(layer: Linear, x: np.ndarray) -> list[torch.Tensor]:
    """What autograd keeps of one forward pass, less the weight itself and the layer's draws."""
    tensors: list[torch.Tensor] = []
    own = {t.data_ptr() for t in (layer.weight, layer.draws.seeds, layer.draws.token_rows, layer.draws.token_columns)}
    leaf = torch.from_numpy(x).to(BF16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (tensors.append(t), t)[1], lambda t: t):
        layer(leaf)
    return [t for t in tensors if t.data_ptr() not in own]


def only(tensors: list[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The one tensor of that dtype and shape, in FP64 unless it is bytes."""
    (found,) = [t for t in tensors if t.dtype == dtype and t.shape == shape]
    return found.numpy() if dtype == U8 else found.double().numpy()


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_kept(name):
    x, w, _ = make(heavy_tails, "BF16", SIZES)
    seen: Counter[torch.dtype] = Counter()
    for tensor in saved(linear(RECIPES[name], w), x):
        seen[tensor.dtype] += tensor.numel() * tensor.element_size()
    assert dict(seen) == BYTES[name]


def test_nothing_unpackable_is_packed():
    """An odd number of columns has no place in bytes of two codes: whole bytes then, the same result."""
    g = np.random.default_rng(0)
    x, w = g.standard_normal((8, 15)), g.standard_normal((6, 15))
    dtypes = Counter(t.dtype for t in saved(linear(RECIPES["fp4_unclamped"], w), x))
    assert U8 not in dtypes and dtypes[E4M3] == 2


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
def test_packed_carriers_are_the_same_bits(data):
    """4.5 bits an element and a scale per row, in place of 8; y, dX and dW do not move."""
    x, w, dy = make(data, "BF16", SIZES)
    packed, plain = linear(fp4_fold.recipe(packed=True), w), linear(fp4_fold.recipe(), w)
    seen: Counter[torch.dtype] = Counter()
    for tensor in saved(packed, x):
        seen[tensor.dtype] += tensor.numel() * tensor.element_size()
    assert seen == {U8: M * K // 2, E4M3: M * K // 16, F32: 4 * M}
    for a, b in zip(run(packed, x, dy, "BF16"), run(plain, x, dy, "BF16")):
        assert torch.equal(a, b)
    told = packed.plan(M, BF16, torch.device("cpu")).describe()["fprop"]["X"]
    assert told == "fresh, rotate_fold; saved: packed codes and scales of blocks"


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
def test_a_packed_operand_on_the_ladder(data):
    """4.5 bits an element and a scale per row, factor included, multiplied as the carriers that the op made."""
    x, w, _ = make(data, "BF16", SIZES)
    layer = linear(override(fp8_eden4.recipe(), {"saved_input": "operand"}), w)
    kept = saved(layer, x)
    seen = Counter({dtype: sum(t.nbytes for t in kept if t.dtype == dtype) for dtype in {t.dtype for t in kept}})
    assert seen == {U8: M * K // 2, E4M3: M * K // 16, F32: 4 * K}
    rotated = layer.recipe.wgrad.rotation
    given = (torch.from_numpy(x).to(BF16), None, True, layer.draws.signs(Gemms.WGRAD), 128, rotated.gain(Operand.B))
    carriers, row = torch.ops.lowprec.rotate_fold_ladder(*given, (1, 16), "mse", SPAN, True)
    codes, scale, of_row = (next(t for t in kept if t.dtype == dtype) for dtype in (U8, E4M3, F32))
    assert torch.equal(torch.ops.lowprec.unpack_ladder(codes, scale).view(U8), carriers.view(U8))
    assert torch.equal(of_row, row)
    told = layer.plan(M, BF16, torch.device("cpu")).describe()
    assert told["fprop"]["X"] == "fresh, quantize; saved: packed codes and scales of blocks of the transpose"
    assert told["wgrad"]["X^T"] == "rounded in the forward pass, rotate_fold, rotated 128"


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
def test_the_codes_that_nvfp4_keeps(data):
    """Both halves of the bytes, and both levels of the scales: X^T rotated along the tokens, W in its squares."""
    x, w, _ = make(data, "BF16", SIZES)
    tensors = saved(linear(nvfp4.recipe(), w), x)
    rotated = rotate_float32(x.T, seeds(WGRAD, ROTATION), 16)
    for tile, (m, k), matrix in (((1, 16), (K, M), rotated), ((16, 16), (N, K), bf16(w))):
        want = quantize(matrix, "E2M1", tile, "NVFP4")
        np.testing.assert_array_equal(unpacked(only(tensors, U8, (m, k // 2))), want.values)
        block = only(tensors, E4M3, want.scale.shape)
        assert np.isin(block, TABLES["E4M3"]).all()
        occupied = np.abs(tiles(matrix, tile)).max(axis=(1, 3)) > 0
        scale = (block * np.float64(np.float32(np.abs(matrix).max() / 2688))).astype(np.float32)
        np.testing.assert_array_equal(scale[occupied], want.scale[occupied])


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe, tile", [(fp8_block.recipe(), (1, 128)), (fp4_mixed.feed_forward(), (-1, -1))])
def test_the_codes_that_fp8_operands_save(recipe, tile, data):
    x, w, _ = make(data, "BF16", SIZES)
    want = quantize(x.T, "E4M3", tile, "POW2")
    np.testing.assert_array_equal(only(saved(linear(recipe, w), x), E4M3, (K, M)), want.values)


# --- SavedInput.OPERAND: rounded in the forward pass, the same as in the backward pass ---

STOCHASTIC_B = {"wgrad": {"b": {"rounding": "stochastic"}}}
OPERANDS: dict[str, LinearRecipe] = {
    "nvfp4": nvfp4.recipe(),
    "nvfp4, X drawn too": override(nvfp4.recipe(), STOCHASTIC_B),
    "nvfp4, not rotated": nvfp4.recipe(rotation=0),
    "fp8_block": fp8_block.recipe(),
    "fp4_mixed": fp4_mixed.feed_forward(),
    "mxfp8": mxfp8.recipe(),
    "mxfp4": override(mxfp4.recipe(), {"saved_input": "OPERAND"}),
    "fp8_eden4": override(fp8_eden4.recipe(), {"saved_input": "OPERAND"}),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["cpu", "gpu's paths"])
@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_kept_is_the_operand_made_later(name, fp8, monkeypatch):
    monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 9) if fp8 else None)
    x, w, dy = make(heavy_tails, "BF16", SIZES)
    kept, later = OPERANDS[name], override(OPERANDS[name], {"saved_input": "INPUT"})
    assert kept != later
    for ours, theirs in zip(run(linear(kept, w), x, dy, "BF16"), run(linear(later, w), x, dy, "BF16")):
        assert torch.equal(ours, theirs)


def test_a_drawn_operand_is_drawn_by_its_own_seed():
    """wgrad's b: its purpose, and columns that count from the micro-batch's first token."""
    x, w, _ = make(heavy_tails, "BF16", SIZES)
    recipe = override(nvfp4.recipe(rotation=0), STOCHASTIC_B)
    bits = random_bits(seeds(WGRAD, B), K, M, (0, FIRST_TOKEN))
    want = quantize(x.T, "E2M1", (1, 16), "NVFP4", 16 / 17, bits=bits)
    packed = only(saved(linear(recipe, w), x), U8, (K, M // 2))
    np.testing.assert_array_equal(unpacked(packed), want.values)


# --- the codes that GEMMs multiply ---


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def multiplied(recipe: LinearRecipe, x: np.ndarray, w: np.ndarray, dy: np.ndarray, monkeypatch) -> dict[str, tuple]:
    """The operands of each product, by the name of its GEMM."""
    seen: list[tuple] = []
    original = linear_gemms.multiply
    watched = lambda a, b, *how, **more: (seen.append((a, b)), original(a, b, *how, **more))[1]  # noqa: E731
    monkeypatch.setattr(linear_gemms, "multiply", watched)
    run(linear(recipe, w), x, dy, "BF16")
    return dict(zip(("fprop", "dgrad", "wgrad"), seen))


REUSING = [name for name, recipe in RECIPES.items() if recipe.dgrad.b is Reuse.FPROP_CODES]


@pytest.mark.parametrize("name", REUSING)
def test_dgrad_multiplies_the_codes_of_fprop(name, monkeypatch):
    """The chain rule's W is the forward pass's, whatever was packed in between; a row scale has gone into dY."""
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    products = multiplied(RECIPES[name], x, w, dy, monkeypatch)
    forward, backward = products["fprop"][1], products["dgrad"][1]
    if name == "w4a8":  # the same numbers as carriers, whose row scales have gone into dY
        carriers, scale = torch.ops.lowprec.fold(forward.codes, forward.scale, "E4M3")
        assert same(backward.codes, carriers.t()) and torch.equal(backward.scale, torch.ones(1, 1))
        assert torch.equal(Quantized(carriers, scale).dequantize(), forward.dequantize())
        return
    assert same(backward.codes, forward.codes.t())
    folded = forward.granularity == "row"
    assert torch.equal(backward.scale, torch.ones(1, 1) if folded else forward.scale.t())
    assert all(same(part, forward.parts[name].t()) for name, part in backward.parts.items())


def seen_by_observer(recipe: LinearRecipe, w: np.ndarray, x: np.ndarray, dy: np.ndarray) -> list[tuple]:
    events: list[tuple] = []
    layer = linear(recipe, w)
    layer.observer = lambda how, x, codes: events.append((how.gemm, how.operand, x, codes, how.quantizer, how.outliers))
    run(layer, x, dy, "BF16")
    return events


def weights_codes(events: list[tuple]) -> Quantized:
    (found,) = [e[3] for e in events if e[:2] == (Gemms.FPROP, Operand.B)]
    return found


@pytest.mark.parametrize("data", DATA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
def test_square_blocks_serve_a_weight_and_its_transpose(name, data):
    """A layer of W^T has the transposed codes and scales of a layer of W: dgrad's b is what rounding W^T would give."""
    x, w, dy = make(data, "BF16", SIZES)
    one = weights_codes(seen_by_observer(RECIPES[name], w, x, dy))
    other = weights_codes(seen_by_observer(RECIPES[name], w.T.copy(), dy, x))
    assert same(other.codes, one.codes.t()) and torch.equal(other.scale, one.scale.t())
    assert all(same(other.parts[part], one.parts[part].t()) for part in one.parts)


def test_lines_do_not_serve_a_transpose():
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    lines = override(nvfp4.recipe(), {"fprop": {"b": {"tile": [1, 16]}}})
    one = weights_codes(seen_by_observer(lines, w, x, dy))
    other = weights_codes(seen_by_observer(lines, w.T.copy(), dy, x))
    assert not same(other.codes, one.codes.t())


# --- the observer ---

FORWARD = ["FPROP A", "FPROP B"]
EVENTS: dict[str, list[str]] = {
    "bf16": [],
    "fp8": [*FORWARD, "DGRAD A"],  # one rounding of dY serves both GEMMs
    "fp8_rowwise": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "fp8_block": [*FORWARD, "WGRAD B", "DGRAD A", "WGRAD A"],
    "mxfp8": [*FORWARD, "WGRAD B", "DGRAD A", "DGRAD B", "WGRAD A"],
    "fp4": [*FORWARD, "DGRAD A", "WGRAD A"],
    "fp4_residual": [*FORWARD, "DGRAD A", "WGRAD A"],
    "fp4_unclamped": [*FORWARD, "DGRAD A", "WGRAD A"],
    "fp4_mixed": [*FORWARD, "WGRAD B", "DGRAD A", "DGRAD B"],
    "mxfp4": ["DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "mxfp4_fp8": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "fp4_fold": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "fp8_eden4": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "nvfp4": [*FORWARD, "WGRAD B", "DGRAD A", "WGRAD A"],
    "nvfp4_lines": [*FORWARD, "WGRAD B", "DGRAD A", "DGRAD B", "WGRAD A"],
    "quartet2": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD A", "WGRAD B"],
    "ufp4": [*FORWARD, "WGRAD B", "DGRAD A", "DGRAD B", "WGRAD A"],
    "reduced_mantissa": [*FORWARD, "DGRAD A", "DGRAD B", "WGRAD B"],
    "w4a8": [*FORWARD, "DGRAD A", "WGRAD A"],
    "averis": [*FORWARD, "WGRAD B", "DGRAD A", "WGRAD A"],
    "int8_switchback": [*FORWARD, "DGRAD A"],
}


@pytest.mark.parametrize("name", RECIPES)
def test_each_rounding_is_reported_once(name):
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    events = seen_by_observer(RECIPES[name], w, x, dy)
    assert Counter(f"{gemm.name} {purpose.name}" for gemm, purpose, *_ in events) == Counter(EVENTS[name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_report_is_what_was_rounded_and_how(name):
    """The quantiser, given the matrix and the draws of its place, returns the codes of the report."""
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    draws = linear(RECIPES[name], w).draws
    for which, purpose, matrix, codes, quantizer, clamp in seen_by_observer(RECIPES[name], w, x, dy):
        noise: tuple = (None, None)
        if quantizer.stochastic:
            origin = draws.token_columns if which is Gemms.WGRAD else draws.token_rows
            noise = (draws.seed(which, purpose), None if (which, purpose) == (Gemms.DGRAD, Operand.B) else origin)
        assert clamp == (RECIPES[name].fprop.outliers if (which, purpose) == (Gemms.FPROP, Operand.A) else None)
        again = quantizer(matrix, *noise) if clamp is None else clamp(matrix, quantizer, *noise)[0]
        assert same(again.codes, codes.codes) and torch.equal(again.scale, codes.scale)


@pytest.mark.parametrize("name", RECIPES)
def test_to_be_watched_changes_nothing(name):
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    watched, alone = linear(RECIPES[name], w), linear(RECIPES[name], w)
    watched.observer = lambda *event: None
    assert all(torch.equal(*pair) for pair in zip(run(watched, x, dy, "BF16"), run(alone, x, dy, "BF16")))


def test_the_matrix_reported_is_rotated_and_folded():
    """nvfp4: X^T H along the tokens. fp4: dY times the scales of W that lie along its reduction."""
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    events = {event[:2]: event for event in seen_by_observer(nvfp4.recipe(), w, x, dy)}
    rotated = rotate_float32(x.T, seeds(WGRAD, ROTATION), 16)
    np.testing.assert_array_equal(events[Gemms.WGRAD, Operand.B][2].float().numpy(), rotated)
    events = {event[:2]: event for event in seen_by_observer(RECIPES["fp4"], w, x, dy)}
    scale = quantize(bf16(w), "E2M1", (1, -1)).scale
    np.testing.assert_array_equal(events[Gemms.DGRAD, Operand.A][2].numpy(), dy.astype(np.float32) * scale.T)


def test_wgrad_takes_the_kept_codes_of_mxfp4_fp8():
    """What was one byte in between comes back as the value of that byte: E4M3 codes times a power of two."""
    x, w, dy = make(outlier_channels, "BF16", SIZES)
    recipe = override(mxfp4_fp8.recipe(), {"wgrad": {"rotation": None}})
    events = {event[:2]: event for event in seen_by_observer(recipe, w, x, dy)}
    kept = quantize(x, "E4M3", rule="POW2").exact
    np.testing.assert_array_equal(events[Gemms.WGRAD, Operand.B][2].double().numpy(), kept.T)
