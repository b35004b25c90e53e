"""On CUDA: the compiled reference has the eager CPU's bits, and FP8 tensor cores multiply FP4 codes exactly."""

from __future__ import annotations

import pytest
import torch

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, INT8, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops import library, tensor_cores
from lowprec_train.ops.cublas import bf16_mm
from lowprec_train.ops.philox import random_bits
from lowprec_train.precision.gemm import multiply
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.plan import compile_plan
from tests.numerics.quantized import ROUNDING
from tests.recipes import RECIPES, build

pytestmark = pytest.mark.gpu
RULES = [ScaleRule.FP32, ScaleRule.POW2, ScaleRule.E8M0_FLOOR, ScaleRule.E8M0_CEIL]


def data(rows: int = 512, columns: int = 768, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (rows, 1), generator=generator)
    )
    x[3] = 0
    x[:, 5] *= 300
    x[7, 32:64] = 0
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (1, 32), (1, 128), (128, 128)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", [E2M1, E4M3, E5M2, INT8])
def test_quantizer_has_the_bits_of_the_cpu(format, rule, tile, stochastic, dtype):
    x = data().to(dtype)
    quantizer = Quantizer(
        format,
        tile,
        scale=rule,
        rounding=ROUNDING[stochastic],
        exponent_span=14 if tile == (1, 32) and rule is not ScaleRule.FP32 else 0,
    )
    seed, origin = torch.tensor(2**40 + 5), torch.tensor([64, 128])
    extra = (seed, origin) if stochastic else ()
    expected = quantizer(x, *extra)
    seen = quantizer(x.cuda(), *(t.cuda() for t in extra))
    assert same(seen.codes, expected.codes)
    assert same(seen.scale, expected.scale)


def test_other_ops_have_the_bits_of_the_cpu():
    ops, x, seed = torch.ops.lowprec, data(), torch.tensor(77)
    assert same(random_bits(seed.cuda(), None, 64, 72), random_bits(seed, None, 64, 72))
    for dtype in (torch.float32, torch.bfloat16):
        assert same(ops.hadamard(x.to(dtype).cuda(), seed.cuda(), 64), ops.hadamard(x.to(dtype), seed, 64))
        bounds = ops.outlier_bounds(x.to(dtype), 7)
        on_gpu = ops.outlier_bounds(x.to(dtype).cuda(), 7)
        assert all(same(a, b) for a, b in zip(on_gpu, bounds, strict=True))
        amax = ops.amax(x.to(dtype), (1, -1))
        expected = ops.quantize_carrier(x.to(dtype), *bounds, amax)
        seen = ops.quantize_carrier(x.to(dtype).cuda(), *on_gpu, amax.cuda())
        assert all(same(a, b) for a, b in zip(seen, expected, strict=True))
    for tile, headroom, draw in (((1, 16), 1.0, None), ((16, 16), 1.0, None), ((1, 16), 16 / 17, seed)):
        rounding = "nearest" if draw is None else "stochastic"
        expected = ops.quantize_nvfp4(x, tile, headroom, rounding, draw, None)
        seen = ops.quantize_nvfp4(x.cuda(), tile, headroom, rounding, None if draw is None else draw.cuda(), None)
        assert all(same(a, b) for a, b in zip(seen, expected, strict=True))
    block = Quantizer(E2M1, (1, 32), scale=ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC, exponent_span=14)(x, seed)
    expected = ops.fold(block.codes, block.scale, "E4M3")
    seen = ops.fold(block.codes.cuda(), block.scale.cuda(), "E4M3")
    assert all(same(a, b) for a, b in zip(seen, expected, strict=True))
    assert same(ops.dequantize(block.codes.cuda(), block.scale.cuda()), ops.dequantize(block.codes, block.scale))
    packed = ops.pack_e2m1(block.codes)
    assert same(ops.pack_e2m1(block.codes.cuda()), packed)
    assert same(ops.unpack_e2m1(packed.cuda()), block.codes)


def exact(a: Quantized, b: Quantized) -> torch.Tensor:
    return a.dequantize().double().cpu() @ b.dequantize().double().cpu().t()


def error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    return ((seen.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("k", [2048, 16384])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_fp4_codes_multiply_exactly(k, mean):
    """Split accumulation, FP32 output, one scale: no error at all; row scales: the rounding of the BF16 output
    alone.
    """
    a, b = torch.randn(256, k) + mean, torch.randn(128, k) + mean
    tensor, row = Quantizer(E2M1, scale=ScaleRule.POW2), Quantizer(E2M1, (1, -1))
    qa, qb = tensor(a.cuda()), tensor(b.cuda())
    assert error(multiply(qa, qb, Path.FP8_TENSOR, split_accumulation=True, dtype=torch.float32), exact(qa, qb)) == 0.0
    qa, qb = row(a.cuda()), row(b.cuda())
    expected = exact(qa, qb)
    rounding = error(expected.bfloat16(), expected)
    assert (
        error(multiply(qa, qb, Path.FP8_ROW, split_accumulation=True, dtype=torch.bfloat16), expected) < 1.05 * rounding
    )


@pytest.mark.parametrize("k", [2048, 16384])
def test_folded_mxfp4_multiplies_to_the_bf16_rounding(k):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(256, k, generator=generator) * torch.exp2(
        torch.randint(-12, 1, (256, k // 32), generator=generator)
    ).repeat_interleave(32, 1)
    b = torch.randn(128, k, generator=generator)
    wide = Quantizer(E2M1, (1, 32), scale=ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC, exponent_span=28)
    other = Quantizer(E2M1, (1, 32), scale=ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC, exponent_span=14)
    qa, qb = wide(a.cuda(), torch.tensor(1).cuda()), other(b.cuda(), torch.tensor(2).cuda())
    expected = exact(qa, qb)
    rounding = error(expected.bfloat16(), expected)
    assert (
        error(multiply(qa, qb, Path.FP8_FOLDED, split_accumulation=True, dtype=torch.bfloat16), expected)
        < 1.05 * rounding
    )


@pytest.mark.parametrize("k", [64, 1024, 8192])
@pytest.mark.parametrize("m", [8, 256])
def test_int8_sums_are_exact(m, k):
    """Also beyond 2**24, where FP32 sums of +-127 * 127 are not."""
    a = torch.full((m, k), 127, dtype=torch.int8)
    a[:, ::5] = -126
    b = torch.randint(-127, 128, (64, k), dtype=torch.int8)
    b[0] = a[0]
    one = torch.ones(1, 1)
    args = (one, b, one, False, torch.float32)
    expected = (a.double() @ b.double().t()).float()
    assert torch.equal(torch.ops.lowprec.scaled_mm(a, *args), expected)
    on_gpu = torch.ops.lowprec.scaled_mm(a.cuda(), one.cuda(), b.cuda(), one.cuda(), False, torch.float32)
    assert torch.equal(on_gpu.cpu(), expected)


@pytest.mark.parametrize("left", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_one_scale_each_are_those_of_the_op(left, split, dtype):
    a, b = (torch.randn(*shape, device="cuda") for shape in ((384, 1024), (512, 1024)))
    given = (a.to(left), a.new_full((1, 1), 0.37), b.to(torch.float8_e4m3fn), b.new_full((1, 1), 3.0), split, dtype)
    assert torch.equal(tensor_cores.multiply(*given), torch.ops.lowprec.scaled_mm(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_factor_in_device_memory_multiplies_the_sum(dtype):
    """Recorded too: a graph reads the factor when it is launched. A product without one comes after it."""
    a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((384, 1024), (512, 1024)))
    factor, exact = a.new_full((1, 1), 0.37, dtype=torch.float32), a.double() @ b.double().t()
    assert library.live_kernels(a.device)["bf16_mm"] == "cuBLAS"
    bf16_mm(a, b, factor, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = bf16_mm(a, b, factor, dtype)
    for value in (0.37, -2.5):
        factor.fill_(value)
        graph.replay()
        error = (product.double() - value * exact).norm() / exact.norm() / abs(value)
        assert error < (2e-3 if dtype is torch.bfloat16 else 1e-6)
        assert torch.equal(bf16_mm(a, b, factor, dtype), product)
    assert (bf16_mm(a, b, None, torch.float32).double() - exact).norm() < 1e-6 * exact.norm()
    assert ((a @ b.t()).double() - exact).norm() < 3e-3 * exact.norm(), "torch's products have their own factors again"


def test_paths_on_hopper():
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 tensor cores")
    paths = {name: compile_plan(RECIPES[name], (2048, 768), 4096, device).paths() for name in RECIPES}
    assert paths["fp8"] == {"fprop": "fp8_tensor", "dgrad": "fp8_tensor", "wgrad": "fp8_tensor"}
    assert paths["fp4"] == {"fprop": "fp8_row", "dgrad": "fp8_row", "wgrad": "fp8_row"}
    assert paths["mxfp4"] == {"fprop": "bf16", "dgrad": "fp8_folded", "wgrad": "fp8_folded"}
    assert paths["mxfp4_fp8"] == {"fprop": "fp8_tensor", "dgrad": "fp8_folded", "wgrad": "fp8_folded"}
    assert paths["fp8_rowwise"] == {"fprop": "fp8_row", "dgrad": "fp8_row", "wgrad": "fp8_row"}
    assert paths["fp4_mixed"] == {"fprop": "fp8_folded", "dgrad": "fp8_tensor", "wgrad": "fp8_tensor"}
    assert paths["int8_switchback"] == {"fprop": "int8", "dgrad": "int8", "wgrad": "bf16"}
    assert paths["nvfp4"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), "dequantize")
    blocks = "fp8_block" if torch.cuda.get_device_capability() == (9, 0) else "dequantize"
    assert paths["fp8_block"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), blocks)


def passes(recipe: str, device: str, compiled: bool = False) -> list[torch.Tensor]:
    layer, draws = Linear(256, 384, bias=False), SeedTable(7, 1, device).at(3, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(384, 256, generator=torch.Generator().manual_seed(4)) / 16)
    layer = layer.to(device)
    layer.recipe, layer.draws = RECIPES[recipe], draws.site(0)
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(device).requires_grad_()
    dy = torch.randn(512, 384, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    if compiled:
        torch.compiler.reset()  # torch keeps eight graphs of one piece of code, and there are more recipes
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    y = run(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_on_cuda_is_the_linear_of_the_cpu(recipe):
    """Equal codes, so only the accumulation order and the rounding of the output differ."""
    for seen, expected in zip(passes(recipe, "cuda"), passes(recipe, "cpu"), strict=True):
        assert error(seen, expected.double()) < 4e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_is_eager_on_cuda(recipe):
    """Draws and codes are the same bits, and the same kernels multiply them."""
    for seen, expected in zip(passes(recipe, "cuda", compiled=True), passes(recipe, "cuda"), strict=True):
        assert error(seen, expected.double().cpu()) < 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_fp8", "nvfp4"])
def test_repeated_draws_repeat_the_bits(recipe, compiled):
    first, second = (passes(recipe, "cuda", compiled) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_never_waits_for_the_device(recipe):
    model, _ = build(RECIPES[recipe])
    model, seeds = model.cuda(), SeedTable(0, model.number_sites(), "cuda")
    tokens = torch.randint(0, 64, (4, 64)).cuda()
    for checked in (False, True):
        torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            model.loss(tokens, tokens, 256.0, draws=seeds.at(int(checked), 0)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
