"""Recipes on block-scaled tensor cores: which plans name them, and that all six operands of a layer reach them whole.

Of the GPU there is its compute capability, and in place of torch's kernels the FP64 product of tests/ops/blackwell.py.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.numerics.formats import E2M1, E4M3
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops.block_scaled import block_scaled_mm
from lowprec_train.precision import gemm, linear_gemms
from lowprec_train.precision.gemm import block_format, levels, multiply
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import LinearPlan, Op, Source
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import LinearRecipe, override
from lowprec_train.recipes import mxfp8, nvfp4
from tests.ops.blackwell import scaled_mm
from tests.recipes import RECIPES

CPU = torch.device("cpu")
OFF = {"native_block_scales": False}
NATIVE = {
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "mxfp4": ("bf16", "mxfp4", "mxfp4"),
    "mxfp4_fp8": ("fp8_tensor", "mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4", "nvfp4"),
    "nvfp4_lines": ("dequantize", "nvfp4", "nvfp4"),  # X has an FP32 number a row
    "quartet2": ("nvfp4", "nvfp4", "nvfp4"),
    "averis": ("nvfp4", "nvfp4", "nvfp4"),
}
FOLDED = {"mxfp4": ("bf16", "fp8_folded", "fp8_folded"), "mxfp4_fp8": ("fp8_tensor", "fp8_folded", "fp8_folded")}


def plan(recipe: LinearRecipe, capability: tuple[int, int], sizes=(384, 256), tokens: int = 256) -> LinearPlan:
    return compile_plan(recipe, sizes, tokens, CPU, capability=capability)


def paths(recipe: LinearRecipe, capability: tuple[int, int], **how) -> tuple[str, ...]:
    return tuple(plan(recipe, capability, **how).paths().values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_follows_the_compute_capability(name):
    """Ten: all three formats; twelve: no MXFP4, which folds as before; nine and eight: as ever."""
    recipe, before = RECIPES[name], paths(RECIPES[name], (8, 9))
    for capability in ((10, 0), (10, 3)):
        assert paths(recipe, capability) == NATIVE.get(name, before)
    assert paths(recipe, (12, 0)) == FOLDED.get(name, NATIVE.get(name, before))
    assert not set(paths(recipe, (9, 0))) & {"mxfp8", "mxfp4", "nvfp4"}


@pytest.mark.parametrize("name", NATIVE)
def test_the_switch_gives_the_plan_of_a_gpu_without_them(name):
    off = override(RECIPES[name], OFF)
    assert plan(off, (10, 0)) == plan(RECIPES[name], (8, 9))


@pytest.mark.parametrize("name", NATIVE)
def test_peaks_of_the_formats(name):
    peaks = {"mxfp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4", "fp8_tensor": "fp8"}
    assert tuple(plan(RECIPES[name], (10, 0)).peaks().values()) == tuple(
        peaks.get(path, "bf16") for path in NATIVE[name]
    )


@pytest.mark.parametrize(
    "recipe, sizes, tokens, want",
    [
        (mxfp8.recipe(gradient="E5M2"), (384, 256), 256, ("mxfp8", "dequantize", "dequantize")),
        (nvfp4.recipe(row_scaled=True), (384, 256), 256, ("dequantize", "nvfp4", "nvfp4")),
        (nvfp4.recipe(), (384, 272), 256, ("dequantize", "nvfp4", "nvfp4")),  # fprop's k is 272
        (nvfp4.recipe(), (400, 256), 256, ("nvfp4", "dequantize", "nvfp4")),  # dgrad's
        (nvfp4.recipe(), (384, 256), 272, ("nvfp4", "nvfp4", "dequantize")),  # wgrad's
    ],
)
def test_what_torch_does_not_multiply(recipe, sizes, tokens, want):
    """E5M2 in MXFP8, an FP32 number for each row of NVFP4, k that is no multiple of 32."""
    assert paths(recipe, (10, 0), sizes=sizes, tokens=tokens) == want


@pytest.mark.parametrize(
    "quantizer, format",
    [
        (Quantizer(E4M3, (1, 32), ScaleRule.POW2), "MXFP8"),
        (Quantizer(E4M3, (32, 32), ScaleRule.E8M0_CEIL), "MXFP8"),
        (Quantizer(E4M3, (32, 1), ScaleRule.E8M0_CEIL), ""),
        (Quantizer(E4M3, (1, 32), ScaleRule.FP32), ""),
        (Quantizer(E4M3, (1, 64), ScaleRule.POW2), ""),
        (Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR), "MXFP4"),
        (Quantizer(E2M1, (1, 16), ScaleRule.E8M0_FLOOR), ""),
        (Quantizer(E2M1, (1, 16), ScaleRule.NVFP4), "NVFP4"),
        (Quantizer(E2M1, (16, 16), ScaleRule.NVFP4), "NVFP4"),
        (Quantizer(E2M1, (1, 32), ScaleRule.NVFP4), ""),
        (Quantizer(E2M1, (1, 16), ScaleRule.LADDER), ""),
    ],
)
def test_formats_of_quantisers(quantizer, format):
    assert block_format(quantizer) == format


def test_mxfp4_keeps_its_blocks_where_they_are_multiplied_as_they_are():
    assert plan(RECIPES["mxfp4"], (10, 0)).dgrad.a.op is Op.QUANTIZE
    assert plan(RECIPES["mxfp4"], (12, 0)).dgrad.a.op is Op.ROTATE_FOLD


def test_w_is_rounded_along_each_reduction_or_in_squares():
    """A scale of a block along k of fprop lies across k of dgrad: only a square serves both."""
    for name, source in (("mxfp8", Source.FRESH), ("quartet2", Source.FRESH), ("nvfp4", Source.FPROP_CODES)):
        made = plan(RECIPES[name], (10, 0))
        assert made.dgrad.b.source is source
        assert (made.dgrad.b.quantizer.tile[0] == 16) is (source is Source.FPROP_CODES)


# --- what is multiplied ---


def trained(recipe: LinearRecipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, compiled: bool = False):
    """(y, dx, dw) of one layer."""
    layer = Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data.copy_(w)
    layer.recipe = recipe
    x = x.clone().requires_grad_()
    y = (torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w, dy of 256 tokens, 256 -> 128, with rows of zeros and channels of other sizes."""
    torch.manual_seed(3)
    channels = 2.0 ** torch.randint(-6, 7, (256,))
    x, w, dy = torch.randn(256, 256) * channels, torch.randn(128, 256) * 0.02, torch.randn(256, 128) * 1e-4
    x[7], dy[9], w[5] = 0, 0, 0
    return x.bfloat16(), w.bfloat16().float(), dy.bfloat16()


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(gemm, "capability_of", lambda device: (10, 0))


@pytest.mark.parametrize("name", NATIVE)
def test_all_operands_reach_torch_as_what_they_stand_for(name, blackwell, monkeypatch):
    """Packed codes times swizzled scales times levels, in FP64, is codes * scale of the quantiser in FP64: for both
    operands of each GEMM that is not plain, to the rounding of what the kernel writes.
    """
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    seen = []

    def watched(a, b, path, **how):
        if path.name in gemm.BLOCK_SCALED:
            (scale_a, factor_a), (scale_b, factor_b) = levels(a), levels(b)
            tensors = (a.codes, scale_a, b.codes, scale_b, factor_a, factor_b)
            got = block_scaled_mm(*tensors, path.name, torch.float32).double()
            left, right = (x.codes.double() * spread(x) for x in (a, b))
            share = 2.0**-8 if path is Path.MXFP4 else 2.0**-22  # of one BF16 number, of two or three FP32 products
            want = left @ right.t()
            bound = share * want.abs() + 2.0**-50 * (left.abs() @ right.abs().t())  # FP64's own
            assert ((got - want).abs() <= bound).all() and want.abs().max() > 0
            seen.append(path.value)
        return multiply(a, b, path, **how)

    monkeypatch.setattr(linear_gemms, "multiply", watched)
    trained(RECIPES[name], *data())
    assert seen == [path for path in NATIVE[name] if path in ("mxfp8", "mxfp4", "nvfp4")]


def spread(x: Quantized) -> torch.Tensor:
    """The scale of every element, FP64: of NVFP4 the product of its levels, which `scale` rounds to FP32."""
    scale = x.scale.double()
    if x.parts:
        scale = x.parts["block"].double() * x.parts["tensor"].double()
    tall, wide = x.codes.shape[0] // scale.shape[0], x.codes.shape[1] // scale.shape[1]
    return scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)


@pytest.mark.parametrize("name", NATIVE)
def test_the_path_changes_no_number_of_the_reference(name, blackwell):
    """On the CPU: the bits of the dequantised product; where that one folds, those of its order of summation."""
    tensors = data()
    native, plain = trained(RECIPES[name], *tensors), trained(override(RECIPES[name], OFF), *tensors)
    for mine, want in zip(native, plain, strict=True):
        if name in FOLDED:
            assert (mine.double() - want.double()).norm() <= 2e-3 * want.double().norm()
        else:
            assert torch.equal(mine, want)


@pytest.mark.parametrize(
    "name", ["nvfp4", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mxfp8", "mxfp4"))]
)
def test_compiled_is_eager(name, blackwell):
    for mine, want in zip(trained(RECIPES[name], *data(), compiled=True), trained(RECIPES[name], *data()), strict=True):
        assert torch.equal(mine, want)
