"""Every quantiser against tests/oracle.py: formats x scale rules x tiles x rounding x head-room x span, bit for bit.

Codes (the sign of zero too), scales (of empty tiles too), NVFP4's block and tensor scales, and the dequantised product
are compared with `array_equal`; nothing has a tolerance. The oracle knows the documents and no code of the package.
"""

from __future__ import annotations

import itertools
import zlib
from functools import cache

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, Format
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from tests import oracle
from tests.numerics.quantized import POWERS, ROUNDING, SCALED, SEED, codes, expected_codes, rules, seed
from tests.oracle_cases import CASES, SHAPES, Case, Tile, extremes, normal, patterns, turning, wide, zeros

F32, F64 = np.float32, np.float64
DTYPES = (torch.float32, torch.bfloat16)
CEIL = (ScaleRule.POW2, ScaleRule.E8M0_CEIL)
HEADROOM_CASES = (normal, turning, zeros)
KINDS = [(f, r) for f in SCALED for r in rules(f)]
rounding = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
kinds = pytest.mark.parametrize("format, rule", KINDS, ids=lambda v: v.name)


@cache
def bits(m: int, k: int) -> np.ndarray:
    return oracle.random_bits(SEED, m, k)


def generator(*place: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(place).encode()))


def matrix(case: Case, tile: Tile, format: Format, dtype: torch.dtype) -> np.ndarray:
    """The case's numbers as the dtype can hold them, FP32."""
    shape = SHAPES[tile]
    x = case(*shape, tile, format.name, generator(case.__name__, tile, format.name, dtype))
    return (oracle.bf16(x) if dtype is torch.bfloat16 else x).astype(F32)


def share(quantizer: Quantizer) -> float:
    """The head-room that docs/numerics.md gives a rule when none is asked for."""
    if quantizer.headroom is not None:
        return quantizer.headroom
    shares = {ScaleRule.E8M0_FLOOR: 3 / 4, ScaleRule.NVFP4: 16 / 17}
    return shares.get(quantizer.scale, 1.0) if quantizer.stochastic else 1.0


def run(quantizer: Quantizer, x: np.ndarray, dtype: torch.dtype = torch.float32) -> Quantized:
    return quantizer(torch.from_numpy(x).to(dtype), seed() if quantizer.stochastic else None)


def expected(quantizer: Quantizer, x: np.ndarray) -> oracle.Rounded:
    return oracle.quantize(
        x,
        quantizer.format.name,
        quantizer.tile,
        quantizer.scale.name,
        share(quantizer),
        quantizer.exponent_span,
        bits(*x.shape) if quantizer.stochastic else None,
        quantizer.outer,
    )


def assert_same(quantizer: Quantizer, x: np.ndarray, dtype: torch.dtype = torch.float32, note: object = "") -> None:
    """Codes and scales, and what they multiply to."""
    got, want = run(quantizer, x, dtype), expected(quantizer, x)
    note = f"{quantizer} {note} {dtype}"
    np.testing.assert_array_equal(got.scale.numpy(), want.scale, err_msg=note)
    expect = expected_codes(want, quantizer.format)
    np.testing.assert_array_equal(codes(got).view(np.uint8), expect.view(np.uint8), err_msg=note)
    if quantizer.scale is ScaleRule.NVFP4:
        amax = np.abs(oracle.tiles(x, quantizer.tile)).max(axis=(1, 3)).astype(F64)
        _, block, tensor = oracle.nvfp4_scales(amax, share(quantizer), quantizer.outer)
        np.testing.assert_array_equal(got.parts["block"].double().numpy(), block, err_msg=note)
        np.testing.assert_array_equal(got.parts["tensor"].numpy(), tensor, err_msg=note)
    with np.errstate(over="ignore"):
        product = want.exact.astype(F32)
    np.testing.assert_array_equal(got.dequantize().numpy(), product, err_msg=note)


# --- the whole product ---


@rounding
def test_nvfp4_under_a_scale_of_each_row(stochastic):
    """And of each column of the transpose, which has the same codes."""
    for (tile, case), dtype in itertools.product(itertools.product(((1, 16), (1, 1), (1, -1)), CASES), DTYPES):
        how = Quantizer(E2M1, tile, ScaleRule.NVFP4, ROUNDING[stochastic], outer=(1, -1))
        x = matrix(case, tile, E2M1, dtype)
        assert_same(how, x, dtype, case.__name__)
        assert_same(how.transposed(), np.ascontiguousarray(x.T), dtype, case.__name__)


@rounding
@kinds
def test_every_tile_and_number(format, rule, stochastic):
    for tile, case, dtype in itertools.product(SHAPES, CASES, DTYPES):
        assert_same(
            Quantizer(format, tile, rule, ROUNDING[stochastic]), matrix(case, tile, format, dtype), dtype, case.__name__
        )


@rounding
@kinds
def test_every_headroom(format, rule, stochastic):
    tiles: list[Tile] = [(-1, -1), (1, 16), (16, 16)]
    for headroom, tile, case in itertools.product((1.0, 3 / 4, 5 / 8, 16 / 17, 0.7, 2.0**-4), tiles, HEADROOM_CASES):
        if case is turning and rule in CEIL and float(F32(format.max * headroom)) != format.max * headroom:
            continue  # maxima within an FP32 rounding of a bound that FP32 cannot hold: the next test
        quantizer = Quantizer(format, tile, rule, ROUNDING[stochastic], headroom)
        assert_same(quantizer, matrix(case, tile, format, torch.float32), note=case.__name__)


@pytest.mark.parametrize("rule", CEIL, ids=lambda r: r.name)
@pytest.mark.parametrize("headroom", [16 / 17, 0.7, 0.9, 1 / 3])
@pytest.mark.parametrize("format", SCALED, ids=str)
def test_a_bound_that_fp32_cannot_hold_turns_at_its_fp32_neighbour(format, headroom, rule):
    """A <= 2^e M h holds within the rounding of the bound M h to FP32, 2^-24, and e is the smallest within it too."""
    edge = F32(format.max * headroom)
    near = np.array([np.nextafter(edge, F32(0)), edge, np.nextafter(edge, F32(1e9))], F32)
    amax = (near[None, :] * 2.0 ** np.arange(-30, 31)[:, None]).astype(F32)
    scale = run(Quantizer(format, (1, 1), rule, headroom=headroom), amax).scale.double().numpy()
    assert (np.frexp(scale)[0] == 0.5).all()
    bound = scale * format.max * headroom
    assert (amax <= bound * (1 + 2.0**-24)).all() and (amax > bound / 2 * (1 - 2.0**-24)).all()
    assert (scale[:, 2] == 2 * scale[:, 0]).all()


@rounding
@pytest.mark.parametrize("format, rule", [(f, r) for f, r in KINDS if r in POWERS], ids=lambda v: v.name)
def test_every_span(format, rule, stochastic):
    tiles: list[Tile] = [(-1, -1), (1, -1), (1, 16), (1, 32), (16, 16), (3, 5)]
    for span, tile, case in itertools.product((1, 14, 28, 60, 250), tiles, (normal, wide, zeros, extremes, patterns)):
        quantizer = Quantizer(format, tile, rule, ROUNDING[stochastic], exponent_span=span)
        assert_same(quantizer, matrix(case, tile, format, torch.float32), note=case.__name__)


@kinds
def test_random_scales_over_sixty_binades(format, rule):
    """The coarse tile has one scale a matrix, so it takes many matrices."""
    for draw in range(61):
        g = generator(format.name, rule.name, draw)
        x = (g.standard_normal((5, 33)) * 2.0 ** (draw - 30 + g.uniform())).astype(F32)
        for stochastic in (False, True):
            assert_same(Quantizer(format, scale=rule, rounding=ROUNDING[stochastic]), x, note=draw)


@rounding
def test_bf16_has_scale_one_and_the_same_rounding(stochastic):
    for tile, case in itertools.product(SHAPES, (normal, wide, zeros, extremes)):
        x = matrix(case, tile, BF16, torch.float32)
        got = run(Quantizer(BF16, tile, rounding=ROUNDING[stochastic]), x)
        want = oracle.to_grid(x, "BF16", bits(*x.shape) if stochastic else None)
        assert np.array_equal(got.codes.double().numpy(), want) and (got.scale == 1).all()
        assert np.array_equal(np.signbit(got.codes.double().numpy()), np.signbit(x))


# --- Inf and NaN: the tile that holds one, and every other tile ---


@rounding
@kinds
def test_non_finite_numbers_stay_in_their_tiles(format, rule, stochastic):
    for tile, bad in itertools.product(SHAPES, (np.inf, -np.inf, np.nan)):
        quantizer = Quantizer(format, tile, rule, ROUNDING[stochastic])
        x = matrix(normal, tile, format, torch.float32)
        place = generator(tile, bad).integers(x.shape)
        x[tuple(place)] = bad
        touched = ~np.isfinite(oracle.tiles(x, tile)).all(axis=(1, 3))
        if rule is ScaleRule.NVFP4:  # one tensor scale for all
            touched |= True
        inside = oracle.spread(touched, x.shape)
        got, want = run(quantizer, x), expected(quantizer, np.where(inside, F32(0), x))
        assert not torch.isfinite(got.scale).numpy()[touched].any(), (tile, bad)
        assert not torch.isfinite(got.dequantize()).numpy()[inside].any(), (tile, bad)
        assert np.array_equal(got.scale.numpy()[~touched], want.scale[~touched]), (tile, bad)
        outside = expected_codes(want, format)[~inside].view(np.uint8)
        assert np.array_equal(codes(got)[~inside].view(np.uint8), outside), (tile, bad)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rule", POWERS, ids=lambda r: r.name)
def test_non_finite_numbers_stay_in_their_rows_under_a_span(rule, bad):
    quantizer = Quantizer(E2M1, (1, 16), rule, exponent_span=14)
    x = matrix(normal, (1, 16), E2M1, torch.float32)
    x[3, 40] = bad
    got = run(quantizer, x)
    want = expected(quantizer, np.delete(x, 3, axis=0))
    assert not torch.isfinite(got.dequantize()[3, 32:48]).any()
    assert np.array_equal(np.delete(got.scale.numpy(), 3, axis=0), want.scale)
    assert np.array_equal(np.delete(codes(got), 3, axis=0), expected_codes(want, E2M1))
