"""The C++ kernels against their meaning in plain PyTorch: the same bits for every format, tile and rule, at odd shapes,
at zeros, subnormals, infinities and NaN, and with the same draws wherever a shard begins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lowprec_train.ops import library, reference, rotated, states
from tests.numerics.data import MATRICES

LIVE = library.live_kernels(torch.device("cpu"))
OPS = ("quantize", "quantize_nvfp4", "quantize_both", "quantize_outliers", "quantize_carrier", "outlier_bounds")
OPS += (
    "dequantize",
    "dequantize_bf16",
    "round_nvfp4",
    "round_eden",
    "fold",
    "transpose",
    "hadamard",
    "rotate_fold",
    "quantize_expanded",
    "dequantize_expanded",
    "dge",
)
pytestmark = pytest.mark.skipif("C++" not in LIVE.values(), reason="no C++ library is built (make kernels)")

SCALED = ("E2M1", "E4M3", "E5M2", "INT4", "INT8", "FP16")
RULES = ("FP32", "POW2", "E8M0_FLOOR", "E8M0_CEIL")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (33, 96)
TILES = [(-1, -1), (1, -1), (-1, 1), (1, 32), (1, 16), (3, 8), (11, 12), (33, 1), (1, 1), (1, 3), (11, -1)]
TORCH_MAKES_NAN_NEGATIVE = [(-1, 1), (33, 1)]  # in a maximum over whole columns
SEED = torch.tensor(0x1234_5678_9ABC_DEF0)
MEANING: dict[str, Callable] = {name: library.EAGER[name] for name in OPS}
MEANING |= {"quantize": reference.quantize, "hadamard": reference.hadamard, "rotate_fold": rotated.rotate_fold}
MEANING |= {"quantize_expanded": states.quantize_expanded, "dequantize_expanded": states.dequantize_expanded}


def _special(m: int, k: int) -> np.ndarray:
    """One row of each kind: NaN of both signs, infinities of both signs, beside numbers and beside zeros."""
    x = MATRICES["normal"](m, k)
    x[0, 5], x[1, 7], x[2, 40], x[3, 41], x[4, :] = np.nan, -np.nan, np.inf, -np.inf, np.nan
    x[5], x[6] = 0.0, -0.0
    x[5, 9], x[6, 0], x[6, 1] = np.inf, np.nan, np.inf
    return x


KINDS = MATRICES | {"special": _special}


def matrix(kind: str, m: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(KINDS[kind](m, k)).to(dtype)


def assert_same(got: Tensor, want: Tensor, signs: bool = True) -> None:
    """Bits of 1-byte codes; elsewhere NaN where NaN is, and the bits of all numbers. Without `signs` those of NaN codes
    and of zeros are not compared.
    """
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.element_size() == 1:
        a, b = (each.contiguous().view(torch.uint8).int() for each in (got, want))
        if not signs:
            a, b = (torch.where(each == 0xFF, 0x7F, each) for each in (a, b))
        assert torch.equal(a, b), (a != b).nonzero()[:4]
        return
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(1, torch.inf, -torch.inf), want.nan_to_num(1, torch.inf, -torch.inf))
    assert not signs or torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def check(op: str, *arguments: object, signs: bool = True) -> None:
    got, want = getattr(torch.ops.lowprec, op)(*arguments), MEANING[op](*arguments)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert_same(a, b, signs)


def test_every_op_has_its_kernel():
    assert {name for name in OPS if LIVE[name] != "C++"} == set()


def test_stochastic_bf16_in_every_binade():
    """Below 2^-118 the grid is coarser than BF16's; above, the kernel adds the random bits to those that BF16 drops."""
    size = (
        torch.arange(2**31 // 2**15, dtype=torch.int32) << 15
    )  # each exponent with 256 mantissas, NaN and infinity too
    noise = torch.randint(2**15, size.shape, generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    x = torch.cat([size | noise, size, (size | noise) ^ -(2**31)]).view(torch.float32).view(-1, 64)
    check("quantize", x, "BF16", [1, -1], "FP32", 1.0, 0, "stochastic", SEED, None)


@pytest.mark.parametrize("format", [*SCALED, "BF16", "FP32"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize(format, rule, kind):
    x = matrix(kind, *SHAPE)
    for tile in TILES:
        signs = kind != "special" or tile not in TORCH_MAKES_NAN_NEGATIVE
        check("quantize", x, format, tile, rule, 1.0, 0, "nearest", None, None, signs=signs)
        check("quantize", x, format, tile, rule, 0.75, 0, "stochastic", SEED, torch.tensor([7, 24]), signs=signs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES[1:])
def test_quantize_within_a_span(kind, rule):
    for tile in ((1, 32), (1, 16), (3, 8)):
        check("quantize", matrix(kind, *SHAPE), "E2M1", tile, rule, 0.75, 12, "nearest", None, None)
        check("quantize", matrix(kind, *SHAPE), "E2M1", tile, rule, 1.0, 5, "stochastic", SEED, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (7, 13), (3, 1029), (64, 257), (130, 520)])
def test_quantize_at_odd_shapes(shape, dtype):
    x = torch.from_numpy(MATRICES["heavy"](*shape)).clamp(-6e4, 6e4).to(dtype)
    for tile in ((-1, -1), (1, -1), (-1, 1), (1, 1)):
        for format in (*SCALED, "BF16", "FP32"):
            check("quantize", x, format, tile, "FP32", 0.9, 0, "nearest", None, None)
            check("quantize", x, format, tile, "POW2", 1.0, 0, "stochastic", SEED, torch.tensor([2**33 + 5, 2**36 + 8]))


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[3:, 5:], lambda x: x[:1].expand(9, -1)]
)
def test_strided_inputs(view):
    x = view(matrix("normal", *SHAPE))
    check("quantize", x, "E4M3", (1, -1), "FP32", 1.0, 0, "nearest", None, None)
    check("quantize_both", x, None, None, None, "E4M3", (1, -1), (-1, -1), "POW2", 1.0)
    codes, scale = torch.ops.lowprec.quantize(x, "E4M3", (1, -1), "FP32", 1.0, 0, "nearest", None, None)
    check("dequantize", codes.t(), scale.t())
    check("transpose", codes.t())


def test_every_fp16_and_bf16_input():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = torch.where(x.isnan(), 0.0, x).to(dtype).reshape(256, 256)
        for format in (*SCALED, "BF16", "FP32"):
            check("quantize", x, format, (1, 1), "FP32", 1.0, 0, "nearest", None, None)
            check("quantize", x, format, (1, -1), "E8M0_FLOOR", 1.0, 0, "stochastic", SEED, None)


@pytest.mark.parametrize("headroom", [1.0, 0.75])
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_nvfp4(kind, headroom):
    for tile in ((1, 16), (3, 8), (-1, -1)):
        check("quantize_nvfp4", matrix(kind, *SHAPE), tile, headroom, "nearest", None, None)
        check("quantize_nvfp4", matrix(kind, *SHAPE), tile, headroom, "stochastic", SEED, torch.tensor([3, 8]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [((-1, -1), (-1, -1)), ((1, -1), (1, -1)), ((1, 32), (1, 11)), ((1, -1), (-1, 1))])
def test_quantize_both(kind, tiles):
    x = matrix(kind, *SHAPE)
    across, down = torch.rand(1, SHAPE[1]) + 0.5, torch.rand(SHAPE[0], 1) + 0.5
    for format in ("E4M3", "E5M2", "E2M1", "INT4", "INT8"):
        for factors in ((None, None), (across, down), (None, down), (across, None)):
            check("quantize_both", x, x.abs().amax(), *factors, format, *tiles, "POW2", 1.0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 64), (65, 131), (200, 63)])
def test_transpose(shape):
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        check("transpose", torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype))
    with pytest.raises(RuntimeError, match="one byte, not of 2"):
        torch.ops.lowprec.transpose(torch.randn(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clipped", [0, 1, 2, 47])
def test_outliers(clipped, dtype):
    for kind in KINDS:
        x = matrix(kind, *SHAPE, dtype)
        check("outlier_bounds", x, clipped, signs=False)  # which of two zeros a selection finds is open
        check("quantize_outliers", x, clipped)
        low, high = reference.outlier_bounds(x, 2)
        check("quantize_carrier", x, low, high, reference.amax(x, (1, -1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("body", [0.0, 2.0**-40])
def test_outliers_that_set_the_scale(body, dtype):
    """Rows of zeros, or of faint numbers, but for three values: magnitudes over 40 binades, NaN, infinity, zeros."""
    x = matrix("heavy", *SHAPE) * 2.0 ** torch.arange(-20, 13)[:, None]
    x[3, 5], x[4, 37], x[5, 69], x[6] = torch.nan, torch.inf, -torch.inf, 0.0
    x = torch.where(torch.arange(SHAPE[1]) % 32 == 5, x, x * body).to(dtype)
    amax = reference.amax(x, (1, -1))
    for clipped in (2, 3, 47):
        check("quantize_outliers", x, clipped)
        check("quantize_carrier", x, *reference.outlier_bounds(x, clipped), amax)
    for given in (0.0, 1.0, 3e38, torch.inf, torch.nan):  # the amax of more than x, or of less
        check("quantize_carrier", x, *reference.outlier_bounds(x, 3), torch.full_like(amax, given))


@pytest.mark.parametrize("carrier", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16])
def test_dequantize_every_code(carrier):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.int16).repeat(3, 1)
    codes = codes.to(torch.int8).view(carrier) if carrier.itemsize == 1 else codes.to(carrier)
    for tile in ((1, 1), (3, 256), (1, 256), (3, 32), (3, 1)):
        scale = torch.rand(3 // tile[0], 256 // tile[1]) * 4 - 1
        scale[0, 0] = torch.nan
        check("dequantize", codes, scale)


@pytest.mark.parametrize("carrier", ["E4M3", "E5M2"])
def test_fold(carrier):
    every = torch.arange(256, dtype=torch.uint8).repeat(8, 1)
    every = torch.where(((every & 127) > 0x4C) & ((every & 127) < 127), every & 0x80, every)  # E2M1 ends at 6
    exponents = torch.randint(-40, 40, (8, 8), generator=torch.Generator().manual_seed(0))
    scale = torch.exp2(exponents.float())
    scale[1, 3], scale[2, 2], scale[3], scale[4, 0] = torch.nan, 2.0**-126, 2.0**-126, torch.inf
    check("fold", every.view(torch.float8_e4m3fn), scale, carrier)
    check("fold", every.view(torch.float8_e4m3fn), scale[:, :1], carrier)
    for kind in MATRICES:
        codes, scale = reference.quantize(
            matrix(kind, *SHAPE), "E2M1", (1, 32), "E8M0_CEIL", 1.0, 0, "nearest", None, None
        )
        check("fold", codes, scale, carrier)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
def test_hadamard(block):
    for kind in MATRICES:
        for dtype in DTYPES:
            x = matrix(kind, 9, 512, dtype)
            check("hadamard", x, SEED, block)
            check("hadamard", x, None, block)
    check("hadamard", matrix("special", 9, 512), SEED, block)


@pytest.mark.parametrize("carrier", ["E4M3", "E5M2"])
@pytest.mark.parametrize("rule", ["E8M0_FLOOR", "E8M0_CEIL", "POW2"])
def test_rotate_fold(carrier, rule):
    span, origin = reference.FOLD_SPAN[carrier], torch.tensor([11, 64])
    for kind in KINDS:
        x = matrix(kind, 32, 64)
        for transposed in (False, True):
            for rotation in (0, 32) if kind != "special" else (0,):
                check(
                    "rotate_fold",
                    x,
                    None,
                    transposed,
                    SEED + 1,
                    rotation,
                    rule,
                    0.75,
                    span,
                    carrier,
                    "stochastic",
                    SEED,
                    origin,
                )
                check(
                    "rotate_fold", x, None, transposed, None, rotation, rule, 1.0, span, carrier, "nearest", None, None
                )


def test_rotate_fold_is_coded():
    codes, scale = reference.quantize(matrix("heavy", 96, 160), "E4M3", (-1, -1), "FP32", 1.0, 0, "nearest", None, None)
    for transposed in (False, True):
        check(
            "rotate_fold", codes, scale, transposed, SEED, 32, "E8M0_FLOOR", 0.75, 28, "E5M2", "stochastic", SEED, None
        )


def test_one_number_that_is_not_finite_is_seen_by_its_rotated_block():
    for value in (torch.nan, torch.inf, -torch.inf):
        x = matrix("normal", 3, 96)
        x[1, 40] = value
        codes, scale = torch.ops.lowprec.rotate_fold(
            x, None, False, SEED, 32, "E8M0_FLOOR", 0.75, 28, "E5M2", "stochastic", SEED, None
        )
        want, _ = rotated.rotate_fold(
            x, None, False, SEED, 32, "E8M0_FLOOR", 0.75, 28, "E5M2", "stochastic", SEED, None
        )
        assert torch.equal(codes.float().isnan(), want.float().isnan()) and codes[1, 32:64].float().isnan().all()
        assert scale.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("group, segments", [(128, 1), (8, 4), (7, 3), (1, 1), (96, 1), (5, 8)])
def test_expanded(format, group, segments):
    for kind in KINDS:
        x = matrix(kind, *SHAPE)
        check("quantize_expanded", x, format, group, segments)
        parts = states.quantize_expanded(x, format, group, segments)
        check("dequantize_expanded", *parts, format, group, segments)


def test_expanded_codes_that_no_encoder_makes():
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128).view(torch.float8_e5m2)
    scale, exponent, center = torch.rand(2, 2) + 0.1, torch.rand(2, 2) * 4 + 0.1, torch.rand(2, 2)
    check("dequantize_expanded", codes, scale, exponent, center, "E5M2", 64, 1)
    check("dequantize_expanded", codes.view(torch.float8_e4m3fn), scale, exponent, center, "E4M3", 64, 1)


@pytest.mark.parametrize("k, cap", [(5.0, 3.0), (1.0, 3.0), (3.0, 1e9), (10.0, 2.0)])
def test_dge(k, cap):
    for kind in KINDS:
        for dtype in DTYPES:
            weight, grad = matrix(kind, *SHAPE, dtype), matrix("normal", *SHAPE, dtype)
            for tile in ((1, -1), (-1, -1), (11, 32)):
                _, scale = reference.quantize(weight, "E2M1", tile, "FP32", 1.0, 0, "nearest", None, None)
                check("dge", grad, weight, scale, k, cap)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    x, before = matrix("normal", 512, 256), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for tile in ((1, -1), (-1, -1), (128, 128), (1, 32)):
            check("quantize", x, "E4M3", tile, "POW2", 1.0, 0, "stochastic", SEED, None)
        check("quantize_both", x, None, None, None, "E4M3", (1, -1), (1, -1), "POW2", 1.0)
        check("rotate_fold", x, None, True, SEED, 32, "E8M0_FLOOR", 0.75, 28, "E5M2", "stochastic", SEED, None)
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused():
    x = matrix("normal", 6, 10)
    with pytest.raises(RuntimeError, match="does not divide"):
        torch.ops.lowprec.quantize(x, "E4M3", (4, -1), "FP32", 1.0, 0, "nearest", None, None)
    with pytest.raises(RuntimeError, match="unknown format"):
        torch.ops.lowprec.quantize(x, "E3M4", (1, -1), "FP32", 1.0, 0, "nearest", None, None)
    with pytest.raises(RuntimeError, match="do not fit a row"):
        torch.ops.lowprec.hadamard(x, None, 4)


def test_matrices_without_elements():
    """They have no scales either, and a division by the number of scales would end the process."""
    x, codes = torch.zeros(0, 32), torch.zeros(0, 32).to(torch.float8_e4m3fn)
    for scale in (torch.ones(0, 1), torch.ones(0, 2), torch.ones(1, 1)):
        check("dequantize", codes, scale)
        check("dequantize_bf16", codes, scale)
        check("dge", x, x, scale, 5.0, 3.0, torch.bfloat16)
    check("dequantize", codes.t(), torch.ones(0, 0))
    check("round_nvfp4", x, 1.0, "nearest", None, None, None, 0)
    check("round_eden", torch.zeros(0, 128), torch.ones(1, 1), SEED, 128, SEED, None)
    check("quantize_nvfp4", x, (1, 16), 1.0, "nearest", None, None)


def test_scales_of_other_matrices_are_refused():
    x, ops = matrix("normal", 6, 128), torch.ops.lowprec
    codes = x.to(torch.float8_e4m3fn)
    for scale in (torch.ones(0, 1), torch.ones(6, 0), torch.ones(4, 1)):
        with pytest.raises(RuntimeError, match="do not fit a matrix"):
            ops.dequantize(codes, scale)
        with pytest.raises(RuntimeError, match="do not fit a matrix"):
            ops.dge(x, x, scale, 5.0, 3.0)
    with pytest.raises(RuntimeError, match="two bounds and an amax for each of 6 rows"):
        ops.quantize_carrier(x, torch.zeros(2, 1), torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="one number, not 0"):
        ops.quantize_eden(x, torch.ones(0, 1), None, 0, SEED, None)
    with pytest.raises(RuntimeError, match="no largest block"):
        how = ("E8M0_FLOOR", 0.75, 14, "E4M3", "stochastic", SEED, None)
        ops.rotate_fold(torch.zeros(0, 64), None, True, None, 0, *how)
