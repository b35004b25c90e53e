"""The C++ kernels of NVFP4 from given maxima, of blocks that reach 6 or 4, of EDEN's factors and of decoding to BF16
against their meaning in plain PyTorch: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.ops import eden, four_over_six, ladder, library, reference
from tests.ops.test_cpu_kernels import DTYPES, KINDS, LIVE, SEED, assert_same, matrix

OPS = ("quantize_nvfp4_by", "quantize_four_over_six", "rotated_amax", "quantize_eden", "dequantize_bf16")
OPS += ("pack_ladder", "unpack_ladder")
pytestmark = pytest.mark.skipif("C++" not in LIVE.values(), reason="no C++ library is built (make kernels)")
SHAPE, WIDE = (32, 96), (9, 384)
kinds = pytest.mark.parametrize("kind", KINDS)


def check(op: str, meaning, *arguments: object) -> None:
    got, want = getattr(torch.ops.lowprec, op)(*arguments), meaning(*arguments)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert_same(a, b, signs=False)


def tops(amax: Tensor) -> list[Tensor]:
    """Above tiles: of all, of a larger whole, of rows of tiles and of columns."""
    return [amax.amax().view(1, 1), amax.amax().view(1, 1) * 8, amax.amax(1, keepdim=True), amax.amax(0, keepdim=True)]


def test_every_op_has_its_kernel():
    assert {LIVE[op] for op in OPS} == {"C++"}


@kinds
@pytest.mark.parametrize("tile", [(1, 16), (16, 16), (3, 8), (1, -1), (-1, 1)], ids=str)
def test_from_maxima(kind, tile):
    x = matrix(kind, 33 if tile == (3, 8) else 32, 96)
    amax = reference.amax(x, tile)
    for top in tops(amax):
        for headroom, rounding in ((1.0, "nearest"), (16 / 17, "stochastic")):
            how = (tile, headroom, rounding, SEED, torch.tensor([3, 8]))
            check("quantize_nvfp4_by", reference.quantize_nvfp4_by, x, amax, top, *how)


@kinds
@pytest.mark.parametrize("by", four_over_six.ERRORS)
def test_six_or_four(kind, by):
    for tile, dtype in zip(((1, 16), (16, 16), (2, 4), (1, 1)), (*DTYPES, torch.float32)):
        x = matrix(kind, *SHAPE).to(dtype)
        amax = reference.amax(x, tile)
        for top in tops(amax)[1:]:
            check("quantize_four_over_six", four_over_six.quantize_four_over_six, x, amax, top, tile, by)


@kinds
@pytest.mark.parametrize("rotation", [0, 2, 128])
def test_factors_of_groups(kind, rotation):
    for dtype in DTYPES:
        x, signs = matrix(kind, *WIDE).to(dtype), SEED if rotation > 2 else None
        check("rotated_amax", eden.rotated_amax, x, signs, rotation)
        top = eden.rotated_amax(x, signs, rotation)
        for most, origin in ((top, None), (top * 8, torch.tensor([2**33 + 5, 2**36 + 128]))):
            check("quantize_eden", eden.quantize_eden, x, most, signs, rotation, SEED, origin)


@kinds
def test_carriers_in_four_bits(kind):
    x = matrix(kind, 9, 160)
    carriers = ladder.rotate_fold_ladder(x, None, False, None, 0, 1.0, (1, 16), "mse", 11, False)[0]
    check("pack_ladder", ladder.pack_ladder, carriers)
    packed = ladder.pack_ladder(carriers)
    check("unpack_ladder", ladder.unpack_ladder, *packed)
    assert_same(torch.ops.lowprec.unpack_ladder(*packed), carriers, signs=False)


def test_a_view_and_one_group():
    x = matrix("normal", 256, 9).t()
    check("quantize_eden", eden.quantize_eden, x, eden.rotated_amax(x, None, 0), None, 0, SEED, None)
    check("quantize_eden", eden.quantize_eden, x[:1, :128], torch.ones(1, 1), SEED, 128, SEED, None)


@pytest.mark.parametrize("carrier", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_decoding_every_code(carrier):
    codes = torch.arange(256, dtype=torch.uint8).view(carrier).view(8, 32)
    for shape in ((1, 1), (8, 1), (8, 2), (4, 8), (1, 32)):
        check("dequantize_bf16", reference.dequantize_bf16, codes, matrix("normal", *shape))


def test_what_does_not_fit_is_refused():
    ops, x = torch.ops.lowprec, torch.ones(4, 192)
    with pytest.raises(RuntimeError, match="128"):
        ops.quantize_eden(x, torch.ones(1, 1), None, 0, SEED, None)
    with pytest.raises(RuntimeError, match="64 do not fit"):
        ops.rotated_amax(torch.ones(4, 96), None, 64)
    with pytest.raises(RuntimeError, match="as many maxima"):
        ops.quantize_nvfp4_by(x, torch.ones(4, 3), torch.ones(1, 1), (1, 16), 1.0, "nearest", None, None)
    with pytest.raises(RuntimeError, match="of a row"):
        ops.quantize_four_over_six(x, torch.ones(4, 12), torch.ones(2, 1), (1, 16), "mse")
    with pytest.raises(RuntimeError, match="power of two"):
        ops.quantize_four_over_six(x, torch.ones(4, 8), torch.ones(1, 1), (1, 24), "mse")
    assert library.live_kernels(torch.device("cpu"))["quantize_eden"] == "C++"
