"""CUDA's quantize, quantize_both and transpose against the Python reference on the CPU: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.numerics.formats import E2M1, E4M3, STOCHASTIC, Format, Rounding, register_format, register_rounding
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import formats, pairs, reference
from lowprec_train.ops.library import live_kernels
from lowprec_train.ops.rounding import ROUNDINGS

pytestmark = pytest.mark.gpu

FORMATS = ("E2M1", "E4M3", "E5M2", "INT4", "INT8", "BF16", "FP16", "FP32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = ("FP32", "POW2", "E8M0_FLOOR", "E8M0_CEIL")
SEED = torch.tensor(0x1234_5678_9ABC_DEF)


def matrix(rows: int, columns: int, dtype: torch.dtype, special: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.randn(rows, 1, generator=generator) * 6)
    x[torch.rand(rows, columns, generator=generator) < 0.02] = 0
    x[:, columns // 2] *= 37
    if special:
        x[0] = 0
        x[rows // 2, 0], x[-1, -1], x[rows // 3, columns // 3] = torch.inf, torch.nan, -torch.inf
        x[1] *= 2.0**-130
    return x.to(dtype)


def same(got: Tensor, want: Tensor) -> None:
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype
    number = torch.ones_like(want, dtype=torch.bool) if want.dtype == torch.int8 else ~want.float().isnan()
    if want.dtype != torch.int8:
        assert torch.equal(~got.float().isnan(), number)  # which NaN it is depends on the machine
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(bits)[number], want.view(bits)[number])


def check(name: str, meaning, *args) -> None:
    on_device = [a.cuda() if isinstance(a, Tensor) else a for a in args]
    got = getattr(torch.ops.lowprec, name)(*on_device)
    for one, other in zip(got, meaning(*args), strict=True):
        same(one, other)


def test_kernels_are_live():
    kernels = live_kernels(torch.device("cuda"))
    assert {
        kernels[name]
        for name in ("quantize", "amax", "quantize_by", "quantize_both", "quantize_transposed", "transpose")
    } == {"CUDA"}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format, dtype, special):
    for rows, columns, tiles in (
        (5, 7, [(-1, -1), (1, -1), (-1, 1), (1, 1), (1, 7), (5, 1)]),
        (33, 264, [(-1, -1), (1, -1), (1, 8), (1, 24), (3, 8), (11, -1)]),
        (256, 4096, [(-1, -1), (1, -1), (1, 16), (1, 32), (1, 128), (128, 128), (16, 16)]),
        (3, 22016, [(1, -1), (1, 128), (-1, -1)]),
    ):
        x = matrix(rows, columns, dtype, special)
        for tile in tiles:
            for rule in RULES if columns < 300 else ("FP32", "POW2"):
                check("quantize", reference.quantize, x, format, tile, rule, 1.0, 0, "nearest", None, None)


LARGER = (
    (5, 7, [(-1, -1), (1, -1), (-1, 1), (1, 1), (1, 7), (5, 1)]),
    (33, 264, [(-1, -1), (1, -1), (-1, 1), (1, 8), (1, 24), (3, 8), (11, -1), (11, 1), (3, 3)]),
    (768, 4096, [(-1, -1), (1, -1), (-1, 1), (384, 1), (1, 16), (128, 128), (16, 16), (-1, 8)]),
    (3, 22016, [(1, -1), (1, 128), (-1, -1)]),
)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax(dtype, special):
    for rows, columns, tiles in LARGER:
        x = matrix(rows, columns, dtype, special)
        for tile in tiles:
            same(torch.ops.lowprec.amax(x.cuda(), tile), reference.amax(x, tile))
            same(torch.ops.lowprec.amax(x.cuda()[1:], (1, tile[1])), reference.amax(x[1:], (1, tile[1])))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_by_amax_of_larger_tiles(format, special):
    for rows, columns, tiles in LARGER:
        x = matrix(rows, columns, torch.bfloat16 if columns > 7 else torch.float32, special)
        for tile in tiles:
            amax = reference.amax(x, tile) * 4.0
            for rule in RULES if columns < 300 else ("FP32", "POW2"):
                how = (format, tile, rule, 1.0)
                check("quantize_by", reference.quantize_by, x, amax, None, *how, 0, "nearest", None, None)
                if rule != "FP32":
                    tops = amax.amax(1, keepdim=True) * 8.0
                    for top in (None, tops):
                        check("quantize_by", reference.quantize_by, x, amax, top, *how, 11, "nearest", None, None)
            if format != "FP32":
                draws = ("stochastic", SEED, torch.tensor([2**33 + 5, 2**36 + 8]))
                how = (format, tile, "POW2", 0.75)
                check("quantize_by", reference.quantize_by, x, amax, None, *how, 0, *draws)


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "FP32"])
def test_quantize_stochastically(format):
    for rows, columns, tiles in ((5, 7, [(1, -1), (1, 1)]), (32, 512, [(1, -1), (-1, -1), (1, 32), (16, 16)])):
        x = matrix(rows, columns, torch.bfloat16, special=rows > 5)
        for tile in tiles:
            for rule, headroom in (("POW2", 1.0), ("E8M0_FLOOR", 0.75), ("FP32", 16 / 17)):
                check("quantize", reference.quantize, x, format, tile, rule, headroom, 0, "stochastic", SEED, None)
                origin = torch.tensor([2**33 + 5, 2**36 + 8])
                check("quantize", reference.quantize, x, format, tile, rule, headroom, 0, "stochastic", SEED, origin)


def test_quantize_within_a_span():
    x = matrix(64, 1024, torch.bfloat16, special=True)
    x[:, 32:64] *= 2.0**-30
    for tile in ((1, 32), (1, 128), (16, 16), (1, -1), (-1, -1)):
        for span, seed in ((28, None), (14, SEED), (3, None)):
            for rule, headroom in (("E8M0_FLOOR", 0.75), ("E8M0_CEIL", 1.0)):
                check(
                    "quantize",
                    reference.quantize,
                    x,
                    "E2M1",
                    tile,
                    rule,
                    headroom,
                    span,
                    "nearest" if seed is None else "stochastic",
                    seed,
                    None,
                )


TILES = [
    ((-1, -1), (-1, -1)),
    ((1, -1), (1, -1)),
    ((1, -1), (-1, 1)),
    ((-1, -1), (1, -1)),
    ((1, 128), (1, 128)),
    ((128, 128), (128, 128)),
    ((1, 128), (128, 128)),
    ((1, 32), (1, 32)),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["E2M1", "E4M3", "E5M2", "INT4", "INT8"])
def test_quantize_both(format, dtype, tiles):
    for rows, columns in ((128, 128), (256, 384), (1024, 640), (144, 136), (24, 40), (7, 5)):
        if any(n > 1 and (rows % n or columns % n) for tile in tiles for n in tile):
            continue
        for special in (False, True):
            x = matrix(rows, columns, dtype, special)
            across, down = torch.rand(1, columns) + 0.01, torch.rand(rows, 1) + 0.01
            for a, d in ((None, None), (across, down), (across, None)):
                for rule in ("FP32", "POW2"):
                    check("quantize_both", pairs.quantize_both, x, None, a, d, format, *tiles, rule, 1.0)


def test_the_producers_amax():
    x = matrix(512, 1024, torch.bfloat16)
    for amax in (x.abs().amax(dim=1).float(), x.abs().amax().float().reshape(1)):
        check("quantize_both", pairs.quantize_both, x, amax, None, None, "E4M3", (-1, -1), (-1, -1), "POW2", 1.0)


def test_large_and_not_contiguous():
    x = matrix(4096, 2048, torch.bfloat16)
    check("quantize_both", pairs.quantize_both, x.t(), None, None, None, "E5M2", (-1, -1), (-1, -1), "POW2", 1.0)
    check("quantize", reference.quantize, x.t(), "E4M3", (1, -1), "FP32", 1.0, 0, "nearest", None, None)


@pytest.mark.parametrize("shape", [(128, 128), (144, 136), (16, 8), (7, 5), (1, 1000), (1024, 4104)], ids=str)
def test_transpose(shape):
    codes = torch.randint(0, 255, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = torch.ops.lowprec.transpose(codes.cuda()).cpu()
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8).t())


def test_what_no_kernel_knows_runs_the_reference():
    """A format and two rules from outside, compiled behind the op: the bits of the CPU, eager and compiled."""
    format = register_format(
        Format(name="E3M2", carrier=torch.float8_e4m3fn, max=28.0, mantissa_bits=2, min_exponent=-2)
    )
    trunc = register_rounding(Rounding(name="toward_zero", rule=lambda steps, bits: steps.trunc()))
    drawn = register_rounding(Rounding(name="drawn_again", rule=STOCHASTIC.rule, stochastic=True))
    try:
        for rows, columns, dtype in ((33, 264, torch.bfloat16), (64, 512, torch.float32)):
            x = matrix(rows, columns, dtype)
            for how in (
                Quantizer(format, (1, -1)),
                Quantizer(format, scale=ScaleRule.POW2, rounding=drawn),
                Quantizer(E4M3, (1, -1), rounding=trunc),
                Quantizer(E2M1, (1, 8), ScaleRule.NVFP4, drawn),
            ):
                seed = SEED if how.stochastic else None
                on_device = None if seed is None else seed.cuda()
                assert how.on_reference(torch.device("cuda"))
                want, call = how(x, seed), torch.compile(lambda x, s, how=how: how(x, s).codes, fullgraph=True)
                got = how(x.cuda(), on_device)
                same(got.codes, want.codes)
                same(got.scale, want.scale)
                same(call(x.cuda(), on_device), want.codes)
    finally:
        formats.FORMATS.pop("E3M2"), ROUNDINGS.pop("toward_zero"), ROUNDINGS.pop("drawn_again")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_the_result_of_a_norm(dtype, special):
    """One kernel from BF16 to E4M3 where vectors are whole and aligned; others first write the result."""
    for rows, columns in ((5, 7), (33, 136), (1000, 4096)):
        x, rate, weight = (
            matrix(rows, columns, dtype, special),
            matrix(rows, 1, torch.float32),
            matrix(1, columns, torch.float32),
        )
        top = reference.amax(reference.normalized(x, rate, weight[0]), (-1, -1))
        for format, rule in (("E4M3", "POW2"), ("E4M3", "FP32"), ("E5M2", "POW2")):
            how = (format, (-1, -1), rule, 1.0, 0, "nearest", None, None)
            check("quantize_by", reference.quantize_by, x, top, None, *how, rate, weight[0])
        by_row = reference.amax(x, (1, -1))
        check("quantize_by", reference.quantize_by, x, by_row, None, "E4M3", (1, -1), *how[2:], rate, weight[0])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_transposed(dtype, special):
    """One kernel to E4M3 where vectors are whole and aligned, and rows whole lines; others transpose x first."""
    for rows, columns in ((5, 7), (33, 136), (16, 8), (144, 200), (1008, 4096)):
        x = matrix(rows, columns, dtype, special)
        rate, weight = matrix(rows, 1, torch.float32), matrix(1, columns, torch.float32)
        for norm in [()] if dtype is torch.float16 else [(), (rate, weight[0])]:
            top = reference.amax(reference.normalized(x, *norm) if norm else x, (-1, -1))
            for format, rule in (("E4M3", "POW2"), ("E4M3", "FP32"), ("E5M2", "POW2"), ("INT8", "FP32")):
                for given in (top, 0.5 * top):
                    check("quantize_transposed", pairs.quantize_transposed, x, given, format, rule, 1.0, *norm)
