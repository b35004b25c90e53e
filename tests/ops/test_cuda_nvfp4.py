"""The CUDA kernels of NVFP4 from given maxima, of blocks that reach 6 or 4, of EDEN's factors against
their meaning in plain PyTorch on the CPU: the same bits at every kind of number, dtype and tile, and at tails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowprec_train.ops import eden, four_over_six, library, reference
from tests.ops.test_cuda_rotate import KINDS, SEED, SIGNS, assert_same, matrix

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
OPS = ("quantize_nvfp4_by", "quantize_four_over_six", "rotated_amax", "quantize_eden", "round_nvfp4", "round_eden")
ORIGIN = torch.tensor([2**33 + 5, 2**35 + 128])
kinds = pytest.mark.parametrize("kind", KINDS)


def check(op: str, meaning: Callable, *arguments: object) -> None:
    moved = [each.to(CUDA) if isinstance(each, Tensor) else each for each in arguments]
    got, want = getattr(torch.ops.lowprec, op)(*moved), meaning(*arguments)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert_same(a.float() if a.dtype is torch.bfloat16 else a, b.float() if b.dtype is torch.bfloat16 else b)


def tops(amax: Tensor) -> list[Tensor]:
    """Above tiles: of a larger whole, of rows of tiles and of columns."""
    return [amax.amax().view(1, 1) * 8, amax.amax(1, keepdim=True), amax.amax(0, keepdim=True)]


def test_every_op_has_its_kernel():
    live = library.live_kernels(CUDA)
    assert {live[op] for op in OPS} == {"CUDA"}


@kinds
@pytest.mark.parametrize("tile", [(1, 16), (16, 16), (3, 8), (3, 5), (1, -1), (-1, 1)], ids=str)
def test_from_maxima(kind, tile):
    for dtype, (m, k) in zip(DTYPES, ((48, 240), (48, 160), (96, 320))):
        x = matrix(kind, m, k, dtype)
        amax = reference.amax(x, tile)
        for top in tops(amax):
            for headroom, rounding in ((1.0, "nearest"), (16 / 17, "stochastic"), (0.75, "stochastic")):
                how = (tile, headroom, rounding, SEED, ORIGIN)
                check("quantize_nvfp4_by", reference.quantize_nvfp4_by, x, amax, top, *how)


@kinds
@pytest.mark.parametrize("by", four_over_six.ERRORS)
def test_six_or_four(kind, by):
    for tile in ((1, 16), (16, 16), (1, 32), (2, 4), (1, 1), (32, 64), (1, 8)):
        for dtype in DTYPES:
            x = matrix(kind, 64, 192).to(dtype)
            amax = reference.amax(x, tile)
            for top in tops(amax):
                check("quantize_four_over_six", four_over_six.quantize_four_over_six, x, amax, top, tile, by)


@pytest.mark.parametrize("m, k", [(1, 16), (3, 48), (129, 4096 + 16), (257, 2032)])
def test_lines_at_tails(m, k):
    for dtype in DTYPES:
        x = matrix("heavy", m, k).to(dtype)
        amax = reference.amax(x, (1, 16))
        for top in (amax.amax().view(1, 1), amax.amax(1, keepdim=True)):
            check("quantize_four_over_six", four_over_six.quantize_four_over_six, x, amax, top, (1, 16), "mse")
            check("quantize_nvfp4_by", reference.quantize_nvfp4_by, x, amax, top, (1, 16), 1.0, "nearest", None, None)


@kinds
@pytest.mark.parametrize("rotation", [0, 2, 16, 64, 128, 256])
def test_factors_of_groups(kind, rotation):
    for dtype in DTYPES:
        x = matrix(kind, 37, 768 if rotation == 256 else 640).to(dtype)
        signs = SIGNS if rotation > 2 else None
        check("rotated_amax", eden.rotated_amax, x, signs, rotation)
        top = eden.rotated_amax(x, signs, rotation)
        for most, origin in ((top, None), (top * 8, ORIGIN)):
            check("quantize_eden", eden.quantize_eden, x, most, signs, rotation, SEED, origin)
            check("round_eden", eden.round_eden, x, most, signs, rotation, SEED, origin)


@kinds
@pytest.mark.parametrize("rotation", [0, 2, 16, 64, 256, 512])
def test_rotated_and_rounded(kind, rotation):
    """By one kernel up to 256, and by two beyond."""
    for dtype in DTYPES:
        x = matrix(kind, 37, 1024).to(dtype)
        signs = SIGNS if rotation > 2 else None
        for headroom, rounding in ((1.0, "nearest"), (16 / 17, "stochastic")):
            how = (headroom, rounding, SEED, ORIGIN, signs, rotation)
            check("quantize_nvfp4", reference.quantize_nvfp4, x, (1, 16), *how)
            check("round_nvfp4", reference.round_nvfp4, x, *how)


@pytest.mark.parametrize("m, k", [(1, 128), (3, 384), (1023, 128), (66, 4224), (513, 11008)])
def test_groups_at_tails(m, k):
    for dtype in (torch.bfloat16, torch.float32):
        x = matrix("heavy", m, k, dtype)
        check("rotated_amax", eden.rotated_amax, x, SIGNS, 128)
        top = eden.rotated_amax(x, SIGNS, 128)
        check("quantize_eden", eden.quantize_eden, x, top, SIGNS, 128, SEED, ORIGIN)


def test_a_view_of_rows_that_are_not_aligned():
    x = matrix("normal", 1, 9 * 256 + 1, torch.bfloat16)[0, 1:].view(9, 256)
    check("quantize_eden", eden.quantize_eden, x, eden.rotated_amax(x, SIGNS, 128), SIGNS, 128, SEED, None)
    amax = reference.amax(x, (1, 16))
    check(
        "quantize_four_over_six", four_over_six.quantize_four_over_six, x, amax, amax.amax().view(1, 1), (1, 16), "mse"
    )


@pytest.mark.parametrize("m, k", [(3, 37), (33, 264)])
def test_decoding(m, k):
    """Compiled from the reference: every code, BF16."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(-(-m * k // 256))[: m * k].view(m, k).view(torch.float8_e4m3fn)
    for shape in ((1, 1), (m, k // 8 if k % 8 == 0 else 1)):
        check("dequantize_bf16", reference.dequantize_bf16, codes, matrix("normal", *shape))
