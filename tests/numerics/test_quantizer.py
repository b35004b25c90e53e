"""The quantiser against tests/oracle.py, bit for bit, over every tile, rule and kind of number; what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, FORMATS, FP32, INT8, STOCHASTIC, Format, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from tests import oracle
from tests.numerics.data import MATRICES, heavy, huge, normal, tiny
from tests.numerics.quantized import (
    POWERS,
    ROUNDING,
    SCALED,
    SEED,
    TILES,
    K,
    M,
    assert_equal_bits,
    codes,
    origin,
    rules,
    seed,
)


def cases(format: Format, rule: ScaleRule) -> list[tuple[str, tuple[int, int]]]:
    """The top binade of FP32 has its own test for the ceil rules."""
    names = [n for n in MATRICES if not (n == "huge" and rule in (ScaleRule.POW2, ScaleRule.E8M0_CEIL))]
    return list(itertools.product(names, TILES))


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    "format, rule", [(f, r) for f in SCALED for r in rules(f)], ids=lambda v: getattr(v, "name", v)
)
def test_codes_and_scales_are_the_oracles(format, rule, stochastic):
    bits = oracle.random_bits(SEED, M, K) if stochastic else None
    for name, tile in cases(format, rule):
        quantizer = Quantizer(format, tile, rule, ROUNDING[stochastic])
        x = MATRICES[name](M, K)
        got = quantizer(torch.from_numpy(x), seed() if stochastic else None)
        want = oracle.quantize(x, format.name, tile, rule.name, quantizer.range_share, 0, bits)
        assert_equal_bits(got, want, format, x, tile)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("span", [14, 28])
@pytest.mark.parametrize("rule", POWERS, ids=lambda r: r.name)
def test_spans_are_the_oracles(rule, span, stochastic):
    bits = oracle.random_bits(SEED, M, K) if stochastic else None
    for name, tile in itertools.product(("normal", "heavy", "sparse", "boundaries"), [(1, 32), (1, 16), (16, 16)]):
        quantizer = Quantizer(E2M1, tile, rule, ROUNDING[stochastic], exponent_span=span)
        x = MATRICES[name](M, K) * np.float32(2) ** (np.arange(K) // 16 * 11)
        got = quantizer(torch.from_numpy(x), seed() if stochastic else None)
        want = oracle.quantize(x, "E2M1", tile, rule.name, quantizer.range_share, span, bits)
        assert_equal_bits(got, want, E2M1, x, tile)


@pytest.mark.parametrize("rule", [ScaleRule.POW2, ScaleRule.E8M0_CEIL], ids=lambda r: r.name)
def test_ceil_rules_in_the_top_binade_of_fp32(rule):
    x = huge(M, K)
    for format in SCALED:
        got = Quantizer(format, (1, 16), rule)(torch.from_numpy(x))
        assert_equal_bits(got, oracle.quantize(x, format.name, (1, 16), rule.name), format, x, (1, 16))


def test_large_tensors_have_the_same_bits():
    m, k = 128, 1024
    quantizer = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC, exponent_span=14)
    x = heavy(m, k)
    got = quantizer(torch.from_numpy(x), seed(), origin(64, 8))
    bits = oracle.random_bits(SEED, m, k, (64, 8))
    assert_equal_bits(got, oracle.quantize(x, "E2M1", (1, 32), "E8M0_FLOOR", 3 / 4, 14, bits), E2M1, x, (1, 32))


def test_span_of_rows_at_the_bottom_of_fp32():
    x = tiny(M, K)
    got = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_CEIL, exponent_span=14)(torch.from_numpy(x))
    assert_equal_bits(got, oracle.quantize(x, "E2M1", (1, 32), "E8M0_CEIL", span=14), E2M1, x, (1, 32))


@pytest.mark.parametrize("format", [BF16, FP32], ids=str)
@pytest.mark.parametrize("tile", [(-1, -1), (1, 16)])
def test_wide_formats_have_scale_one(format, tile):
    assert not format.scaled
    for name, matrix in MATRICES.items():
        x = matrix(M, K)
        q = Quantizer(format, tile)(torch.from_numpy(x))
        assert (q.scale == 1).all() and q.codes.dtype == format.carrier
        want = x
        if format is BF16:
            want = oracle.bf16(x)
            if name == "huge":  # values that round beyond the largest BF16 may saturate or overflow
                inside = np.abs(x) < oracle.largest("BF16")
                want = np.where(inside, want, q.codes.double().numpy())
        assert np.array_equal(q.codes.double().numpy(), want)
        assert np.array_equal(np.signbit(q.codes.double().numpy()), np.signbit(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_is_read_as_fp32(dtype):
    x = torch.from_numpy(normal(M, K)).to(dtype)
    for format, rule in [(E4M3, ScaleRule.POW2), (E2M1, ScaleRule.NVFP4), (INT8, ScaleRule.FP32)]:
        quantizer = Quantizer(format, (1, 16), rule)
        a, b = quantizer(x), quantizer(x.float())
        assert np.array_equal(codes(a), codes(b)) and torch.equal(a.scale, b.scale)


def test_a_transposed_view_is_its_copy():
    x = torch.from_numpy(heavy(K, M)).t()
    quantizer = Quantizer(E2M1, (1, 16), rounding=STOCHASTIC)
    a, b = quantizer(x, seed()), quantizer(x.contiguous(), seed())
    assert np.array_equal(codes(a), codes(b)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format", [BF16, E4M3], ids=str)
def test_codes_of_one_byte_and_of_two_are_transposed(format, device):
    """CUDA's kernel transposes bytes alone, and refuses others."""
    one = Quantizer(format, (1, 16) if format.scaled else (-1, -1))(torch.from_numpy(normal(M, K)).to(device))
    transposed = one.t()
    assert torch.equal(transposed.codes.float(), one.codes.float().t()) and torch.equal(transposed.scale, one.scale.t())
    if device == "cuda" and format is BF16:
        with pytest.raises(RuntimeError, match="one byte, not of 2"):
            torch.ops.lowprec.transpose(one.codes)


# --- zeros, Inf and NaN ---


@pytest.mark.parametrize("format", SCALED, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_zeros_are_zeros(format, tile):
    x = torch.zeros(M, K)
    for rule in rules(format):
        q = Quantizer(format, tile, rule)(x)
        assert torch.equal(q.dequantize(), x) and (q.scale == 1).all()
        q = Quantizer(format, tile, rule, rounding=STOCHASTIC)(x, seed())
        assert torch.equal(q.dequantize(), x) and torch.isfinite(q.scale).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", [*SCALED, BF16, FP32], ids=str)
def test_non_finite_stays_visible_and_in_its_tile(format, bad):
    x = torch.from_numpy(normal(M, K))
    broken = x.clone()
    broken[5, 20] = bad
    for rule, tile, stochastic in itertools.product(rules(format), TILES, [False, True]):
        if not format.scaled and (stochastic or rule is not ScaleRule.FP32):
            continue
        quantizer = Quantizer(format, tile, rule, ROUNDING[stochastic])
        clean = quantizer(x, seed() if stochastic else None).dequantize().numpy()
        got = quantizer(broken, seed() if stochastic else None).dequantize().numpy()
        assert not np.isfinite(got[5, 20]), (rule, tile)
        if rule is ScaleRule.NVFP4:  # its tensor scale belongs to every tile
            continue
        hit = np.zeros((M, K), bool)
        oracle.tiles(hit, tile)[oracle.tiles(np.isin(np.arange(M * K).reshape(M, K), 5 * K + 20), tile)] = True
        touched = oracle.tiles(hit, tile).any(axis=(1, 3))
        others = ~oracle.spread(touched, (M, K))
        assert np.array_equal(got[others], clean[others]), (rule, tile)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("span", [14, 28])
def test_non_finite_stays_visible_under_a_span(bad, span):
    x = torch.from_numpy(normal(M, K))
    x[5, 20] = bad
    got = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, STOCHASTIC, exponent_span=span)(x, seed()).dequantize()
    assert not torch.isfinite(got[5, 20])
    assert torch.isfinite(got[torch.arange(M) != 5]).all()


# --- refusals ---


def test_seed_is_required_exactly_when_stochastic():
    x = torch.ones(32, 32)
    with pytest.raises(ValueError, match="seed"):
        Quantizer(E2M1, rounding=STOCHASTIC)(x)
    with pytest.raises(ValueError, match="seed"):
        Quantizer(E2M1)(x, seed())


@pytest.mark.parametrize("tile, number", [((1, 32), "32"), ((3, -1), "3"), ((16, 16), "16")])
def test_a_tile_that_does_not_divide_is_an_error(tile, number):
    quantizer = Quantizer(E2M1, tile)
    with pytest.raises(ValueError, match=number) as error:
        quantizer(torch.ones(8, 40))
    assert "40" in str(error.value) or "8" in str(error.value)
    with pytest.raises(ValueError, match=number):
        quantizer.check(8, 40)


@pytest.mark.parametrize("tile", [(0, 1), (1, 0), (-2, 1), (1, -3)])
def test_a_tile_is_positive_or_everything(tile):
    with pytest.raises(ValueError):
        Quantizer(E2M1, tile)


@pytest.mark.parametrize("shape", [(32,), (2, 32, 32)])
def test_only_matrices_are_quantised(shape):
    with pytest.raises(ValueError, match="2"):
        Quantizer(E2M1)(torch.ones(shape))


def test_nvfp4_is_for_e2m1_and_span_for_powers_of_two():
    with pytest.raises(ValueError, match="E4M3"):
        Quantizer(E4M3, (1, 16), ScaleRule.NVFP4)
    for wrong in (((16, 16), ScaleRule.NVFP4), ((1, 16), ScaleRule.FP32)):
        with pytest.raises(ValueError, match="outer"):
            Quantizer(E2M1, *wrong, outer=(1, -1))
    with pytest.raises(ValueError, match="128"):
        Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, outer=(1, 128))
    with pytest.raises(ValueError, match="span"):
        Quantizer(E2M1, (1, 32), ScaleRule.FP32, exponent_span=14)


def test_unknown_names():
    with pytest.raises(ValueError, match="E3M4"):
        parse_format("E3M4")
    assert all(parse_format(name) is format for name, format in FORMATS.items())
    with pytest.raises(ValueError):
        ScaleRule("OCP")
