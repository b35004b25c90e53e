"""Which path a GEMM takes: by the table of docs/numerics.md, as planned before the first step, and as run.

A GPU's tensor cores are put in by hand: `choose` is told of them, and the ops have the same meaning on any machine.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.numerics.quantizer import Quantized
from lowprec_train.precision import gemm, linear_gemms
from lowprec_train.precision.gemm import (
    Codes,
    accumulate,
    capability_of,
    choose,
    has_block_scales,
    has_fp8,
    multiply,
)
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import LinearRecipe, check, override
from lowprec_train.recipes import fp4_mixed, fp8, fp8_block, fp8_rowwise
from tests.recipes import RECIPES

CPU = torch.device("cpu")
E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

ON_A_GPU = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8_tensor", "fp8_tensor", "fp8_tensor"),
    "fp8_rowwise": ("fp8_row", "fp8_row", "fp8_row"),
    "fp8_block": ("dequantize", "dequantize", "dequantize"),
    "mxfp8": ("dequantize", "dequantize", "dequantize"),
    "fp4": ("fp8_row", "fp8_row", "fp8_row"),
    "fp4_residual": ("fp8_row", "fp8_row", "fp8_row"),
    "fp4_unclamped": ("fp8_row", "fp8_row", "fp8_row"),
    "fp4_mixed": ("fp8_folded", "fp8_tensor", "fp8_tensor"),
    "mxfp4": ("bf16", "fp8_folded", "fp8_folded"),
    "mxfp4_fp8": ("fp8_tensor", "fp8_folded", "fp8_folded"),
    "fp4_fold": ("fp8_row", "fp8_row", "fp8_row"),
    "fp8_eden4": ("fp8_tensor", "fp8_row", "fp8_row"),
    "nvfp4_lines": ("dequantize", "dequantize", "dequantize"),
    "nvfp4": ("dequantize", "dequantize", "dequantize"),
    "quartet2": ("dequantize", "dequantize", "dequantize"),
    "ufp4": ("dequantize", "dequantize", "dequantize"),
    "reduced_mantissa": ("dequantize", "dequantize", "dequantize"),
    "w4a8": ("fp8_folded", "fp8_tensor", "fp8_tensor"),
    "averis": ("dequantize", "dequantize", "dequantize"),
    "int8_switchback": ("int8", "int8", "bf16"),
}


def execution(recipe: LinearRecipe, k: int, n: int, tokens: int = 256) -> dict[str, str]:
    return compile_plan(recipe, (n, k), tokens, CPU).paths()


@pytest.fixture
def tensor_cores(monkeypatch):
    monkeypatch.setattr(gemm, "capability_of", lambda device: (8, 9))


def test_a_cpu_has_no_fp8():
    assert capability_of(CPU) is None and not has_fp8(None)


@pytest.mark.parametrize("name", RECIPES)
def test_on_a_cpu(name):
    want = [path if path in ("bf16", "int8") else "dequantize" for path in ON_A_GPU[name]]
    assert execution(RECIPES[name], 384, 256) == dict(zip(("fprop", "dgrad", "wgrad"), want))


@pytest.mark.parametrize("name", RECIPES)
def test_on_a_gpu(name, tensor_cores):
    assert execution(RECIPES[name], 384, 256) == dict(zip(("fprop", "dgrad", "wgrad"), ON_A_GPU[name]))


@pytest.mark.parametrize(
    "recipe, sizes, paths",
    [
        (override(fp8.recipe(), {"fprop": {"codes_only": True}}), (384, 256), ("bf16", "fp8_tensor", "fp8_tensor")),
        (
            override(fp8.recipe(), {"fprop": {"a": {"format": "E5M2"}}}),
            (384, 256),
            ("fp8_tensor",) * 2 + ("dequantize",),
        ),
        (override(fp8.recipe(), {"fprop": {"b": {"tile": [1, -1]}}}), (384, 256), ("fp8_row",) + ("fp8_tensor",) * 2),
        (fp8_rowwise.recipe(gradient="E5M2"), (384, 256), ("fp8_row",) * 3),
        (fp8_rowwise.recipe(), (392, 256), ("dequantize",) * 3),
        (fp8_rowwise.recipe(), (384, 264), ("dequantize", "dequantize", "fp8_row")),
        (
            override(fp4_mixed.feed_forward(), {"fprop": {"b": {"exponent_span": 0}}}),
            (384, 256),
            ("dequantize",) + ("fp8_tensor",) * 2,
        ),
        (
            override(fp4_mixed.feed_forward(), {"fprop": {"b": {"exponent_span": 20}}}),
            (384, 256),
            ("dequantize",) + ("fp8_tensor",) * 2,
        ),
        (
            override(fp4_mixed.feed_forward(), {"fprop": {"a": {"exponent_span": 40}}}),
            (384, 256),
            ("dequantize",) + ("fp8_tensor",) * 2,
        ),
        (RECIPES["int8_switchback"], (388, 256), ("dequantize", "dequantize", "bf16")),
        (RECIPES["int8_switchback"], (392, 264), ("int8", "int8", "bf16")),
    ],
)
def test_variants_on_a_gpu(recipe, sizes, paths, tensor_cores):
    """E5M2 meets E5M2, a span that does not fit its carrier, sizes that tensor cores do not take."""
    assert execution(recipe, *sizes) == dict(zip(("fprop", "dgrad", "wgrad"), paths))


@pytest.mark.parametrize("fp8_cores", [False, True])
@pytest.mark.parametrize(
    "a, b, n, k, path",
    [
        (Codes(None), Codes(None), 5, 7, Path.BF16),
        (Codes(None), Codes(E4M3), 16, 16, Path.DEQUANTIZE),
        (Codes(I8, "row"), Codes(I8), 8, 24, Path.INT8),
        (Codes(I8, "row"), Codes(I8, "row"), 8, 24, Path.INT8),
        (Codes(I8, "block"), Codes(I8), 8, 24, Path.DEQUANTIZE),
        (Codes(I8), Codes(I8), 12, 24, Path.DEQUANTIZE),
        (Codes(I8), Codes(I8), 8, 12, Path.DEQUANTIZE),
        (Codes(I8), Codes(E4M3), 16, 16, Path.DEQUANTIZE),
        (Codes(E4M3), Codes(E4M3), 32, 48, Path.FP8_TENSOR),
        (Codes(E4M3, "row"), Codes(E5M2), 32, 48, Path.FP8_ROW),
        (Codes(E5M2), Codes(E5M2), 32, 48, Path.DEQUANTIZE),
        (Codes(E4M3), Codes(E4M3), 24, 48, Path.DEQUANTIZE),
        (Codes(E4M3), Codes(E4M3), 32, 40, Path.DEQUANTIZE),
        (Codes(E4M3, "block"), Codes(E4M3, "block"), 32, 64, Path.DEQUANTIZE),
        (Codes(E4M3, "block", 0, (1, 128)), Codes(E4M3, "block", 0, (128, 128)), 32, 256, Path.DEQUANTIZE),
        (Codes(E4M3, "block", 28), Codes(E4M3, "block", 14), 32, 64, Path.FP8_FOLDED),
        (Codes(E4M3, "block", 14), Codes(E4M3, "block", 14), 32, 64, Path.FP8_FOLDED),
        (Codes(E4M3, "block", 28), Codes(E4M3, "block", 28), 32, 64, Path.DEQUANTIZE),
        (Codes(E4M3, "block", 29), Codes(E4M3, "block", 14), 32, 64, Path.DEQUANTIZE),
        (Codes(E4M3, "block", 14), Codes(E4M3), 32, 64, Path.FP8_FOLDED),
        (Codes(E4M3, "block", 14), Codes(E5M2, "row"), 32, 64, Path.FP8_FOLDED),
        (Codes(E4M3, "block", 28), Codes(E5M2, "row"), 32, 64, Path.DEQUANTIZE),
    ],
)
def test_the_rule(a, b, n, k, path, fp8_cores):
    anywhere = path in (Path.BF16, Path.INT8)
    capability = (8, 9) if fp8_cores else None
    assert choose(a, b, n, k, capability) is (path if fp8_cores or anywhere else Path.DEQUANTIZE)
    assert choose(b, a, n, k, capability) is choose(a, b, n, k, capability)


LINE, SQUARE = Codes(E4M3, "block", 0, (1, 128)), Codes(E4M3, "block", 0, (128, 128))


@pytest.mark.parametrize(
    "a, b, m, path",
    [
        (LINE, SQUARE, 64, Path.FP8_BLOCK),
        (LINE, LINE, 64, Path.FP8_BLOCK),
        (SQUARE, SQUARE, 64, Path.DEQUANTIZE),
        (LINE, SQUARE, 66, Path.DEQUANTIZE),
        (LINE, Codes(E4M3, "block", 0, (1, 64)), 64, Path.DEQUANTIZE),
        (Codes(E5M2, "block", 0, (1, 128)), Codes(E5M2, "block", 0, (1, 128)), 64, Path.DEQUANTIZE),
        (Codes(E4M3, "row"), LINE, 64, Path.DEQUANTIZE),
        (Codes(E4M3, "block", 28), Codes(E4M3, "block", 14), 64, Path.FP8_FOLDED),
    ],
)
def test_block_scales_in_the_main_loop(a, b, m, path):
    assert choose(a, b, 256, 256, (9, 0), m=m) is path


# --- planned and run ---

SHAPES = [(384, 256), (128, 256), (256, 128), (128, 128), (64, 32), (32, 64), (16, 16), (24, 40), (20, 12)]


def accepts(name: str, shape: tuple[int, int]) -> bool:
    try:
        check(RECIPES[name], name=name, in_features=shape[0], out_features=shape[1], tokens=256)
    except ValueError:
        return False
    return True


def planned(name: str, shape: tuple[int, int]) -> list[str]:
    """Of the GEMMs that round something; the others are BF16."""
    gemms, paths = RECIPES[name].gemms(), execution(RECIPES[name], *shape)
    assert all(paths[which] == "bf16" for which in gemms if gemms[which].is_identity)
    return [paths[which] for which in gemms if not gemms[which].is_identity]


def seen(x: Quantized | torch.Tensor) -> Codes:
    """What the choice depends on, from the tensors of an operand alone."""
    if not isinstance(x, Quantized):
        return Codes(None)
    if x.exponent_span and x.granularity != "tensor":  # folded, or to be folded
        return Codes(x.codes.dtype, "block", x.exponent_span)
    tile = (x.codes.shape[0] // x.scale.shape[0], x.codes.shape[1] // x.scale.shape[1])
    return Codes(x.codes.dtype, x.granularity, tile=tile if x.granularity == "block" else (0, 0))


def chosen(name: str, shape: tuple[int, int], monkeypatch) -> list[str]:
    """What `choose` says of the operands that there are, in the order of the GEMMs; each runs by that path."""
    paths: list[Path] = []

    def watched(a, b, path, **how):
        values = b.codes if isinstance(b, Quantized) else b
        rows = (a.codes if isinstance(a, Quantized) else a).shape[0]
        paths.append(choose(seen(a), seen(b), *values.shape, gemm.capability_of(CPU), m=rows))
        assert path is paths[-1]
        return multiply(a, b, path, **how)

    monkeypatch.setattr(linear_gemms, "multiply", watched)
    layer = Linear(*shape, bias=False)
    layer.recipe = RECIPES[name]
    torch.manual_seed(1)
    layer(torch.randn(256, shape[0]).bfloat16().requires_grad_()).sum().backward()
    return [path.value for path in paths if path is not Path.BF16]


PAIRS = [(name, shape) for name in RECIPES for shape in SHAPES if accepts(name, shape)]


@pytest.mark.parametrize(
    ("capability", "fp8", "blocks"),
    [
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, False),
        ((12, 0), True, False),
    ],
)
def test_paths_follow_the_compute_capability(capability, fp8, blocks, monkeypatch):
    """FP8 from Ada on; blocks of FP32 scales on Hopper alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    line, square = (Codes(E4M3, "block", tile=tile) for tile in ((1, 128), (128, 128)))
    found = capability_of(torch.device("cuda", 0))
    assert found == capability and (has_fp8(found), has_block_scales(found)) == (fp8, blocks)
    assert choose(Codes(E4M3), Codes(E4M3), 64, 64, found) is (Path.FP8_TENSOR if fp8 else Path.DEQUANTIZE)
    assert choose(Codes(E4M3, "row"), Codes(E4M3), 64, 64, found) is (Path.FP8_ROW if fp8 else Path.DEQUANTIZE)
    of_blocks = choose(line, square, 128, 128, found)
    assert of_blocks is (Path.FP8_BLOCK if blocks else Path.DEQUANTIZE)


@pytest.mark.parametrize("name, shape", PAIRS)
def test_the_plan_is_what_runs(name, shape, monkeypatch):
    assert chosen(name, shape, monkeypatch) == planned(name, shape)


@pytest.mark.parametrize("name, shape", PAIRS)
def test_the_plan_is_what_runs_on_a_gpu(name, shape, tensor_cores, monkeypatch):
    assert chosen(name, shape, monkeypatch) == planned(name, shape)


TWICE_ROUNDED = {"ufp4"}
KEEPING = {**RECIPES, "mxfp4, operand kept": override(RECIPES["mxfp4"], {"saved_input": "OPERAND"})}


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_dequantised_is_exact_in_bf16(name, monkeypatch):
    """A GPU multiplies it in BF16: codes times the part of their scale that stays inside the sum. Those of FP32 block
    scales are no BF16 numbers; the linter's `twice-rounded` says so.
    """
    recipe = KEEPING[name]
    factors: list[torch.Tensor] = []
    for module in (gemm, linear_gemms):
        monkeypatch.setattr(module, "accumulate", lambda a, b: (factors.extend((a, b)), accumulate(a, b))[1])
    layer = Linear(256, 128, bias=False)
    layer.recipe = recipe
    x = torch.randn(384, 256).mul(torch.logspace(-3, 3, 384)[:, None]).bfloat16().requires_grad_()
    layer(x).backward(torch.randn(384, 128).bfloat16())
    exact = [torch.equal(factor.float(), factor.bfloat16().float()) for factor in factors]
    assert all(exact) if name not in TWICE_ROUNDED else not any(exact)
    assert len(factors) >= 2 * sum(path == "dequantize" for path in execution(recipe, 256, 128, 384).values())


def test_every_recipe_is_planned():
    assert {name for name, _ in PAIRS} == set(RECIPES) == set(ON_A_GPU)
    assert (
        ("fp8_block", (128, 128)) in PAIRS and ("nvfp4", (16, 16)) in PAIRS and fp8_block.recipe() in RECIPES.values()
    )
