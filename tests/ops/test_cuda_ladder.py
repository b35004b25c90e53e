"""The CUDA kernels of blocks on the ladder against their meaning in plain PyTorch on the CPU: the same bits of codes
and of rows' scales, for rows and columns, every input, rotation and span, at tails, and for what is not finite.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Candidates
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import ladder, library
from lowprec_train.ops.ladder_cases import pack_ladder
from lowprec_train.precision.gemm import multiply
from lowprec_train.precision.gemm_path import Path
from tests.ops.test_cuda_rotate import KINDS, SIGNS, assert_same, matrix

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ways = pytest.mark.parametrize("transposed", [False, True])


@pytest.fixture(autouse=True)
def live() -> None:
    if library.live_kernels(CUDA)["rotate_fold_ladder"] != "CUDA":
        pytest.skip("no CUDA kernel of rotate_fold_ladder is built (make kernels)")


def check(x: Tensor, scale: Tensor | None, transposed: bool, rotation: int, *how: object) -> None:
    signs, gain = (SIGNS, 2.0 ** -(rotation.bit_length() // 2)) if rotation else (None, 1.0)
    arguments = (x, scale, transposed, signs, rotation, gain, (1, 16), *how)
    moved = [each.to(CUDA) if isinstance(each, Tensor) else each for each in arguments]
    want = ladder.rotate_fold_ladder(*arguments)
    for a, b in zip(torch.ops.lowprec.rotate_fold_ladder(*moved), want, strict=True):
        assert_same(a, b)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rotation_and_span(kind, dtype, transposed):
    x = matrix(kind, 256, 256, dtype)
    for rotation in (0, 16, 64, 128, 256):
        for how in (("mse", 11, True), ("mse", 3, False), ("none", 11, True)):
            check(x, None, transposed, rotation, *how)


@ways
@pytest.mark.parametrize("m, k", [(16, 16), (32, 96), (96, 32), (160, 224), (64, 2048), (2112, 64), (288, 2144)])
def test_tails(m, k, transposed):
    for dtype in (torch.bfloat16, torch.float32):
        x = matrix("heavy", m, k, dtype)
        for rotation in (0, 16, 32, 128):
            if not rotation or (m if transposed else k) % rotation == 0:
                check(x, None, transposed, rotation, "mse", 11, True)


@pytest.mark.parametrize("m, k", [(5, 4096), (3, 11008), (2, 28672), (2, 29696), (1, 32768), (2, 40960)])
def test_long_rows(m, k):
    check(matrix("normal", m, k, torch.bfloat16), None, False, 128, "mse", 11, True)
    check(matrix("wide", m, k, torch.bfloat16), None, False, 0, "mse", 11, False)


def test_long_columns():
    check(matrix("normal", 16384, 40, torch.bfloat16), None, True, 128, "mse", 11, True)
    blocks = 2 * torch.cuda.get_device_properties(CUDA).multi_processor_count  # a column has more tiles of 256 tokens
    check(matrix("heavy", 256 * blocks + 384, 8, torch.bfloat16), None, True, 128, "mse", 11, True)


@ways
@pytest.mark.parametrize("m, k", [(128, 128), (384, 200 - 8), (1024, 256)])
def test_codes_under_one_scale_and_one_a_row(m, k, transposed):
    codes = matrix("normal", m, k).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = torch.exp2(torch.arange(m) % 9 - 4.0)[:, None]
    for scale in (torch.tensor([[0.25]]), rows):
        for rotation in (0, 64, 128):
            if rotation == 0 or (m if transposed else k) % rotation == 0:
                check(codes, scale, transposed, rotation, "mse", 11, rotation > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [2, 8, 16, 64, 128, 256])
def test_rotations_in_half_precision(kind, block):
    for dtype in (torch.bfloat16, torch.float32):
        x = matrix(kind, 37, 512, dtype)
        for scaled in (x, x.float() * 2.0**-130, x.float() * 2.0**100):
            got = torch.ops.lowprec.hadamard_half(scaled.to(CUDA), SIGNS.to(CUDA), block, 0.25)
            assert_same(got, ladder.hadamard_half(scaled, SIGNS, block, 0.25))


@pytest.mark.parametrize("m, f", [(9, 48), (64, 192), (33, 1088), (257, 2056), (16, 11008), (9, 14336), (9, 14400)])
def test_the_gradient_of_swiglu_and_its_codes_are_those_of_two_ops(m, f):
    """Rows of up to 28672 columns are in one kernel, wider ones, FP16 and other rotations in several."""
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16):
            dy, gate_up = (matrix(kind, m, width, dtype).to(CUDA) for width in (f, 2 * f))
            for rotation in (each for each in (0, 32, 128) if not each or 2 * f % each == 0):
                how = (SIGNS.to(CUDA) if rotation else None, rotation, 0.125 if rotation else 1.0, (1, 16), "mse", 11)
                for corrected in (True, False):
                    dx, _ = torch.ops.lowprec.gated_silu_backward(dy, gate_up)
                    want = (dx, *torch.ops.lowprec.rotate_fold_ladder(dx, None, False, *how, corrected))
                    over = dy.clone()
                    dx, scale = torch.ops.lowprec.gated_silu_backward_ladder(over, gate_up, *how, corrected)
                    for a, b in zip((dx, over.view(torch.float8_e4m3fn), scale), want, strict=True):
                        assert_same(a, b.cpu())


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_rounded_to_e4m3_first(kind, transposed):
    """Columns of BF16 under a rotation of 128 in one kernel, others in two."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for m, k in ((256, 256), (384, 1152), (640, 96)):
            x = matrix(kind, m, k, dtype)
            _, scale = torch.ops.lowprec.quantize(x, "E4M3", (-1, -1), "POW2", 1.0, 0, "nearest", None, None)
            for given in (scale, torch.tensor([[0.3]]), torch.tensor([[2.0**-120]]), torch.tensor([[torch.inf]])):
                for rotation in (0, 32, 128):
                    if not rotation or (m if transposed else k) % rotation == 0:
                        check(x, given, transposed, rotation, "mse", 11, True)


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_the_input_of_a_norm(kind, transposed):
    """In one kernel: columns of BF16 under a rotation of 128 that are rounded to E4M3 first, and rows of BF16 that are
    not; others in several. A tile has 256 tokens of 32 columns, a warp's part of a row 1024 columns.
    """
    for dtype in (torch.bfloat16, torch.float32):
        for m, k in ((256, 256), (384, 1160 if transposed else 1152), (640, 96)):
            x, rate, weight = matrix(kind, m, k, dtype), matrix("normal", m, 1).abs(), matrix("normal", k, 1)[:, 0]
            for scale in (torch.tensor([[0.25]]), torch.tensor([[0.3]]), None):
                for rotation in (each for each in (0, 32, 128) if not each or (m if transposed else k) % each == 0):
                    check(x, scale, transposed, rotation, "mse", 11, True, None, rate, weight)


@ways
def test_rows_and_groups_of_any_size(transposed):
    """From rows of 2^-126 to rows of 2^120, groups of 128 that differ by 30 binades, rows of zeros."""
    x = matrix("normal", 256, 256)
    rows = torch.exp2(torch.arange(256) % 83 * 3 - 126.0)[:, None]
    groups = torch.exp2((torch.arange(256) // 16 % 4) * 10.0 - 20.0)
    for y in (x * rows, x * groups, x * groups[:, None], (x * rows).t(), x * (rows > 1)):
        for rotation in (0, 128):
            check(y.bfloat16().contiguous(), None, transposed, rotation, "mse", 11, True)


@pytest.mark.parametrize("k", [2048, 16384])
def test_products_are_those_of_the_codes(k):
    """Of FP8 tensor cores under a scale per row, with split accumulation: FP64 on the same codes, rounded to BF16."""
    quantizer = Quantizer(E2M1, (1, 16), ScaleRule.LADDER, exponent_span=11, candidates=Candidates.MSE)
    g = torch.Generator().manual_seed(k)
    a, b = (quantizer(torch.randn(256, k, generator=g).to(CUDA)) for _ in range(2))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    got = multiply(a, b, Path.FP8_ROW, split_accumulation=True, dtype=torch.bfloat16).double()
    assert ((got - exact).norm() / exact.norm()).item() < 2.0**-8


def test_the_same_bits_whenever_it_runs():
    """Sums of rows by atomics: any order."""
    x = matrix("heavy", 4096, 512, torch.bfloat16).to(CUDA)
    made = [torch.ops.lowprec.rotate_fold_ladder(x, None, True, SIGNS.to(CUDA), 128, 0.125, (1, 16), "mse", 11, True)]
    made += [torch.ops.lowprec.rotate_fold_ladder(x, None, True, SIGNS.to(CUDA), 128, 0.125, (1, 16), "mse", 11, True)]
    assert torch.equal(made[0][1], made[1][1])


def check_packing(carriers: Tensor) -> None:
    want = ladder.pack_ladder(carriers)
    for a, b in zip(torch.ops.lowprec.pack_ladder(carriers.to(CUDA)), want, strict=True):
        assert_same(a, b)
    moved = [each.to(CUDA) for each in want]
    assert_same(torch.ops.lowprec.unpack_ladder(*moved), ladder.unpack_ladder(*want))


def test_carriers_in_four_bits():
    for (carriers,) in pack_ladder().values():
        check_packing(carriers)
    for kind in KINDS:
        x = matrix(kind, 67, 1072)
        for span in (3, 11):
            check_packing(ladder.rotate_fold_ladder(x, None, False, None, 0, 1.0, (1, 16), "mse", span, False)[0])
    assert_same(
        torch.ops.lowprec.pack_ladder(torch.empty(0, 32, device=CUDA, dtype=torch.float8_e4m3fn))[0],
        torch.empty(0, 16, dtype=torch.uint8),
    )


def test_every_code_with_every_scale_in_four_bits():
    """Products that E4M3 has and that it has not, blocks whose largest code is not 6, and an address between words."""
    g = torch.Generator().manual_seed(3)
    scale = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    nibbles = torch.arange(256).to(torch.uint8).view(32, 8).repeat(256, 1)
    scales = scale.repeat_interleave(32)[:, None]
    carriers = ladder.unpack_ladder(nibbles, scales)
    check_packing(carriers)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    largest = torch.randint(1, 9, (len(scales), 1), generator=g)
    codes = grid[torch.randint(0, 8, (len(scales), 16), generator=g) % largest]
    check_packing((codes * scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn))
    shifted = torch.cat([torch.zeros(5).to(torch.float8_e4m3fn), carriers.flatten()])[5:].view(carriers.shape)
    check_packing(shifted)
    moved = torch.cat([torch.zeros(5).to(torch.float8_e4m3fn), carriers.flatten()]).to(CUDA)[5:].view(carriers.shape)
    assert_same(torch.ops.lowprec.pack_ladder(moved)[0], ladder.pack_ladder(carriers)[0])
