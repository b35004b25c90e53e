"""Every code of every format as an input: exactness, idempotence, ties and the thresholds of stochastic rounding.

What enters is built from the format's table (tests/oracle.py) times every power of two that FP32 can hold the product
with, so that the scale which must come out, and each code, are known without computing them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, E5M2, FP16, STOCHASTIC, Format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from tests import oracle
from tests.numerics.quantized import ROUNDING, SCALED, SEED, assert_equal_bits, codes, expected_codes, rules, seed

F32, F64 = np.float32, np.float64
CEIL = (ScaleRule.POW2, ScaleRule.E8M0_CEIL)
formats = pytest.mark.parametrize("format", SCALED, ids=str)
BEYOND = F32(3e38)  # direction of nextafter


def signed(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values, -values])


def powers(format: Format) -> np.ndarray:
    """Exponents e such that code * 2^e is an FP32 number for every code; every ninth of them for FP16's long table."""
    table = oracle.TABLES[format.name]
    lowest = max(-126, -149 - int(oracle.floor_log2(table[1])))
    highest = 127 - int(oracle.floor_log2(table[-1]))
    return np.arange(lowest, highest + 1, 9 if format is FP16 else 1)


def at_power(values: np.ndarray, e: int, format: Format, rule: ScaleRule, stochastic: bool = False):
    """values * 2^e beside M * 2^e, quantised as one row; asserts that the scale is 2^e."""
    x = np.ldexp(np.append(values.astype(F64), oracle.largest(format.name)), e).astype(F32)[None, :]
    quantizer = Quantizer(format, (1, -1), rule, ROUNDING[stochastic], headroom=1.0)
    q = quantizer(torch.from_numpy(x), seed() if stochastic else None)
    assert q.scale.item() == 2.0**e, (e, rule)
    return codes(q)[0, :-1]


def expect(values: np.ndarray, format: Format) -> np.ndarray:
    return expected_codes(oracle.Rounded(values, np.ones((1, 1), F32)), format)


# --- every code ---


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("rule", [*CEIL, ScaleRule.E8M0_FLOOR], ids=lambda r: r.name)
@formats
def test_every_code_at_every_power_of_two_is_itself(format, rule, stochastic):
    values = signed(oracle.TABLES[format.name])
    want = expect(values, format).view(np.uint8)
    for e in powers(format):
        assert np.array_equal(at_power(values, e, format, rule, stochastic).view(np.uint8), want), e


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_all_256_bytes(format):
    """Finite bytes come back, Inf and NaN give their row a product that is not finite."""
    every = torch.arange(256, dtype=torch.uint8).view(format.carrier)
    x = torch.stack([every.float(), torch.full((256,), format.max)], dim=1)
    finite = torch.isfinite(x[:, 0])
    assert int(finite.sum()) == {"E4M3": 254, "E5M2": 248}[format.name]
    for rule in rules(format):
        q = Quantizer(format, (1, -1), rule)(x)
        assert torch.equal(q.codes[finite, 0].view(torch.uint8), every[finite].view(torch.uint8))
        assert (q.scale[finite] == 1).all()
        assert not torch.isfinite(q.dequantize()[~finite]).any() and not torch.isfinite(q.scale[~finite]).any()
        same = Quantizer(format, (-1, -1), rule)(every[finite][None, :])  # read from an FP8 tensor as from FP32
        assert torch.equal(same.codes[0].view(torch.uint8), every[finite].view(torch.uint8))


def test_nvfp4_keeps_every_code_under_every_block_scale():
    """All 15 codes in a block of each of E4M3's scales, the smallest to 448, under tensor scales over 60 binades."""
    values = np.append(signed(oracle.TABLES["E2M1"])[:15], 6.0)
    blocks = oracle.TABLES["E4M3"][1:]
    for e in np.random.default_rng(1).uniform(-30, 30, 40):
        tensor = F32(2.0**e)
        x = (blocks[:, None] * F64(tensor) * values).astype(F32)
        q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4)(torch.from_numpy(x))
        assert np.array_equal(codes(q), np.tile(expect(values, E2M1), (len(blocks), 1)))
        assert np.array_equal(q.parts["block"].double().numpy()[:, 0], blocks)
        assert abs(q.parts["tensor"].item() / tensor - 1) <= 2.0**-22


@formats
def test_quantising_what_was_quantised_changes_nothing(format):
    """Idempotent to nearest, at random scales. Powers of two: the same numbers. Quotients: the same codes, and scales
    within two roundings."""
    g = np.random.default_rng(2)
    tiles = [(-1, -1), (1, -1), (-1, 1), (1, 16), (1, 32), (1, 128), (16, 16), (32, 128)]
    for rule, tile, _ in itertools.product(rules(format), tiles, range(4)):
        scale = g.uniform(-30, 30, (32 if rule is not ScaleRule.NVFP4 else 1, 1))  # NVFP4: no subnormal blocks
        x = (g.standard_normal((32, 128)) * 2.0**scale).astype(F32)
        quantizer = Quantizer(format, tile, rule)
        once = quantizer(torch.from_numpy(x))
        twice = quantizer(once.dequantize())
        if rule in (ScaleRule.FP32, ScaleRule.NVFP4):
            assert np.allclose(twice.scale, once.scale, rtol=2.0**-22, atol=0), (rule, tile)
            assert np.array_equal(codes(twice), codes(once)), (rule, tile)
        else:
            assert torch.equal(twice.dequantize(), once.dequantize()), (rule, tile)


# --- between the codes ---


def between(format: Format) -> np.ndarray:
    """Midpoints of neighbouring codes, and the FP32 numbers beside them and beside the codes, of both signs."""
    table = oracle.TABLES[format.name]
    exact = np.concatenate([(table[1:] + table[:-1]) / 2, table[1:-1]]).astype(F32)
    return signed(np.concatenate([exact, np.nextafter(exact, F32(0)), np.nextafter(exact, BEYOND)]).astype(F64))


@pytest.mark.parametrize("rule", CEIL, ids=lambda r: r.name)
@formats
def test_every_midpoint_at_every_power_of_two(format, rule):
    values = between(format)
    want = expect(oracle.to_grid(values, format.name), format).view(np.uint8)
    for e in powers(format):
        if e < -100:  # the neighbours of a midpoint need all 24 bits
            continue
        assert np.array_equal(at_power(values, e, format, rule).view(np.uint8), want), e


@formats
def test_midpoints_go_to_the_even_code(format):
    """Said without the oracle's rounding: of two neighbouring codes one has an even index, and the tie goes to it."""
    table = oracle.TABLES[format.name]
    index = np.arange(len(table) - 1)
    even = table[index + index % 2]
    got = at_power((table[1:] + table[:-1]) / 2, 0, format, ScaleRule.POW2)
    assert np.array_equal(got.view(np.uint8), expect(even, format).view(np.uint8))


def test_every_bf16_midpoint_and_its_neighbours():
    table = oracle.TABLES["BF16"]
    middle = ((table[1:] + table[:-1]) / 2).astype(F32)
    x = signed(np.stack([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, BEYOND)]))
    q = Quantizer(BF16)(torch.from_numpy(x))
    assert np.array_equal(q.codes.double().numpy(), oracle.bf16(x))


@formats
def test_every_bf16_number(format):
    """All 65,280 of them, a row for each high byte (sign and seven bits of the exponent)."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    x = x[torch.isfinite(x).all(dim=1)]
    assert x.shape == (254, 256)
    for rule, stochastic in itertools.product(rules(format), (False, True)):
        quantizer = Quantizer(format, (1, -1), rule, ROUNDING[stochastic])
        bits = oracle.random_bits(SEED, *x.shape) if stochastic else None
        got = quantizer(x, seed() if stochastic else None)
        want = oracle.quantize(x.float().numpy(), format.name, (1, -1), rule.name, quantizer.range_share, 0, bits)
        assert_equal_bits(got, want, format, x.float().numpy(), (1, -1))


# --- the threshold of stochastic rounding ---


@formats
def test_stochastic_rounding_turns_at_its_own_threshold(format):
    """At 65536 f = r + 1/2 an element goes down, at the next FP32 number up, r being its own 16 bits."""
    table = oracle.TABLES[format.name]
    usable = min(len(table) - 1, 63 if format in (FP16,) else 10**6)  # code + threshold fit into 24 bits
    index = np.tile(np.arange(usable), (64, 1))
    bits = oracle.random_bits(SEED, 64, usable + 1)[:, :-1]
    gap = table[index + 1] - table[index]
    exact = table[index] + (bits + 0.5) / 65536 * gap
    x = exact.astype(F32)
    fits = x == exact
    assert fits.mean() > 0.8
    for values, up in ((x, False), (np.nextafter(x, BEYOND), True), (-x, False), (-np.nextafter(x, BEYOND), True)):
        row = np.hstack([values, np.full((64, 1), format.max, F32)]).astype(F32)
        q = Quantizer(format, (-1, -1), ScaleRule.POW2, rounding=STOCHASTIC)(torch.from_numpy(row), seed())
        assert q.scale.item() == 1
        want = np.copysign(table[index + up], values)
        assert np.array_equal(q.codes.double().numpy()[:, :-1][fits], want[fits])
