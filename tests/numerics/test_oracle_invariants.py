"""What must hold whatever the numbers: a transpose quantises alike, NVFP4's levels, no clipping, no bias, packing.

Stated on the results alone (methods T04, T05, T07, T01), over random matrices and those of tests/oracle_cases.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, INT8, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from tests import oracle
from tests.numerics.quantized import ROUNDING, codes, seed
from tests.oracle_cases import CASES

F32, F64 = np.float32, np.float64
NVFP4_TILES = [(1, 16), (16, 16), (16, 1), (1, 128), (128, 128), (-1, -1)]
cases = pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)


def generator(value: int) -> np.random.Generator:
    return np.random.default_rng(value)


def amax(x: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    return np.abs(oracle.tiles(x, tile)).max(axis=(1, 3)).astype(F64)


# --- W and its transpose ---


def assert_transposed(straight: Quantized, transposed: Quantized) -> None:
    assert torch.equal(straight.codes.view(torch.uint8).t(), transposed.codes.view(torch.uint8))
    assert torch.equal(straight.scale.t(), transposed.scale)
    for part in straight.parts:
        a, b = straight.parts[part].float(), transposed.parts[part].float()
        assert torch.equal(a.t(), b), part


SQUARES = [
    (E2M1, (16, 16), ScaleRule.NVFP4),
    (E4M3, (128, 128), ScaleRule.POW2),
    (E5M2, (128, 128), ScaleRule.POW2),
    (INT8, (128, 128), ScaleRule.POW2),
    (E4M3, (128, 128), ScaleRule.FP32),
    (E2M1, (32, 32), ScaleRule.E8M0_CEIL),
]


@cases
@pytest.mark.parametrize("format, tile, rule", SQUARES, ids=lambda v: str(getattr(v, "name", v)))
def test_square_tiles_quantise_a_transpose_alike(format, tile, rule, case):
    quantizer = Quantizer(format, tile, rule)
    for dtype, draw in itertools.product((torch.float32, torch.bfloat16), range(2)):
        x = case(256, 384, tile, format.name, generator(draw))
        w = torch.from_numpy(x if dtype is torch.float32 else oracle.bf16(x).astype(F32)).to(dtype)
        straight = quantizer(w)
        assert_transposed(straight, quantizer(w.t()))
        assert_transposed(straight, quantizer(w.t().contiguous()))
        back = straight.t()  # what dgrad reuses is what it would have made itself
        assert torch.equal(back.codes.view(torch.uint8), quantizer(w.t()).codes.view(torch.uint8))
        assert torch.equal(back.scale, quantizer(w.t()).scale)


# --- NVFP4's two levels ---


def levels(q: Quantized) -> tuple[np.ndarray, float]:
    return q.parts["block"].double().numpy(), q.parts["tensor"].double().item()


@pytest.mark.parametrize("tile", NVFP4_TILES, ids=str)
def test_nvfp4_levels_follow_the_maxima(tile):
    """448 where the tensor's largest is; 6 b t within 1/16 of a block's maximum, or half of the subnormal step."""
    for e, case in itertools.product(np.linspace(-60, 60, 13), CASES[:4]):
        x = (case(256, 128, tile, "E2M1", generator(int(e) + 99)) * 2.0 ** (e / 2)).astype(F32)
        block, tensor = levels(Quantizer(E2M1, tile, ScaleRule.NVFP4)(torch.from_numpy(x)))
        top = amax(x, tile)
        assert block.ravel()[top.argmax()] == 448 == block.max()
        assert tensor == F32(top.max() / 2688)
        wrong = np.abs(block * 6 * tensor - top)
        normal = top >= 2.0**-6 * 6 * tensor
        assert (wrong <= top / 16)[normal].all()
        held = ~normal & (top >= 2.0**-9 * 6 * tensor)
        assert (wrong <= 2.0**-10 * 6 * tensor * (1 + 2.0**-20))[held].all()
        assert (block[top < 2.0**-10 * 6 * tensor] == 2.0**-9).all()


@pytest.mark.parametrize("tile", NVFP4_TILES, ids=str)
def test_stochastic_nvfp4_never_clips(tile):
    """x / s <= 6: E4M3 rounds a normal number down by at most 1/17 of it, and a subnormal block scale gives way."""
    for draw, case in itertools.product(range(10), CASES[:4]):
        x = case(256, 128, tile, "E2M1", generator(draw))
        q = Quantizer(E2M1, tile, ScaleRule.NVFP4, rounding=STOCHASTIC)(torch.from_numpy(x), seed())
        assert (amax(x, tile) / q.scale.double().numpy() <= 6 * (1 + 2.0**-22)).all()


def test_stochastic_nvfp4_at_the_edges_of_e4m3():
    """Blocks whose share lies just below, at and above each tie of E4M3, where the scale is rounded down the most."""
    table = oracle.TABLES["E4M3"]
    ties = (table[1:] + table[:-1]) / 2
    ties = ties[(ties > 2.0**-6) & (ties < 400)]
    for e in np.linspace(-30, 30, 31):
        tensor = F32(2.0**e)
        share = (ties[:, None] * np.array([1 - 2.0**-22, 1, 1 + 2.0**-22])).ravel() * 17 / 16
        x = np.zeros((len(share) + 1, 16), F32)
        x[0, 0], x[1:, 5] = 17 / 16 * 2688 * F64(tensor), share * 6 * F64(tensor)
        q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, rounding=STOCHASTIC)(torch.from_numpy(x), seed())
        assert (amax(x, (1, 16)) / q.scale.double().numpy() <= 6 * (1 + 2.0**-22)).all()


def test_stochastic_nvfp4_does_not_clip_under_a_subnormal_block_scale():
    """A block below 2^-15 of the tensor's largest has a scale on E4M3's coarse end: nearest leaves x / s = 8.47."""
    x = np.zeros((4000, 16), F32)
    x[0, 0] = 2688.0
    x[1:, 3] = 6 * np.linspace(2.0**-9, 2.0**-6, 3999)
    q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, rounding=STOCHASTIC)(torch.from_numpy(x), seed())
    ratio = amax(x, (1, 16)) / q.scale.double().numpy()
    block = levels(q)[0]
    assert (ratio <= 6 * (1 + 2.0**-22)).all()
    assert set(oracle.TABLES["E4M3"][1:8]) <= set(block[1:].ravel())


# --- stochastic rounding has no bias ---

UNBIASED = [
    (E2M1, ScaleRule.NVFP4),
    (E2M1, ScaleRule.E8M0_FLOOR),
    (E2M1, ScaleRule.FP32),
    (E4M3, ScaleRule.POW2),
    (E4M3, ScaleRule.FP32),
    (E5M2, ScaleRule.E8M0_CEIL),
    (INT8, ScaleRule.FP32),
]


@pytest.mark.parametrize("format, rule", UNBIASED, ids=lambda v: v.name)
def test_stochastic_rounding_of_blocks_of_16_is_unbiased(format, rule):
    """z of every element's mean over the draws, and their mean square, which is 1 for independent errors."""
    draws, rows = 500, 12
    g = generator(8)
    x = (g.standard_normal((rows, 32)) * 2.0 ** g.uniform(-4, 4, (rows, 1))).astype(F32)
    q = Quantizer(format, (1, 16), rule, rounding=STOCHASTIC)(torch.from_numpy(np.tile(x, (draws, 1))), seed())
    scale = oracle.spread(q.scale.double().numpy(), (draws * rows, 32)).reshape(draws, rows, 32)
    assert (scale == scale[0]).all()
    got = (q.codes.double().numpy().reshape(scale.shape) * scale).mean(axis=0)
    table = oracle.TABLES[format.name]
    ratio = np.abs(oracle.scaled(x, q.scale.numpy()[:rows])).astype(F64)
    below, above = (table[i] for i in oracle.neighbours(ratio, table))
    sigma = scale[0] * np.sqrt(np.maximum((above - ratio) * (ratio - below), 0) / draws)
    moving = sigma > 1e-2 * scale[0] * (above - below) / np.sqrt(draws)
    z = ((got - x) / np.where(moving, sigma, 1))[moving & (above > below)]
    n = len(z)
    assert n > 300 and np.abs(z).max() < 4.5
    assert abs(z.sum()) < 4.5 * np.sqrt(n) and abs((z**2).mean() - 1) < 4.5 * np.sqrt(2 / n)


# --- two E2M1 codes a byte ---

pack, unpack = torch.ops.lowprec.pack_e2m1, torch.ops.lowprec.unpack_e2m1


def nibbles(values: np.ndarray) -> np.ndarray:
    """From the format's table: sign in bit 3, place in the grid below it, the first code in the low half."""
    n = np.searchsorted(oracle.TABLES["E2M1"], np.abs(values)) + 8 * np.signbit(values)
    return (n[:, 0::2] + 16 * n[:, 1::2]).astype(np.uint8)


def test_all_256_bytes_unpack_and_pack_to_themselves():
    every = torch.arange(256, dtype=torch.uint8)[None, :]
    assert torch.equal(pack(unpack(every)), every)
    assert np.array_equal(nibbles(unpack(every).double().numpy()), every.numpy())


@cases
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_packing_keeps_what_the_quantisers_make(case, stochastic):
    rules = [(ScaleRule.NVFP4, (1, 16)), (ScaleRule.NVFP4, (16, 16)), (ScaleRule.POW2, (1, 128))]
    for rule, tile in [*rules, (ScaleRule.FP32, (1, 128)), (ScaleRule.E8M0_FLOOR, (1, 32))]:
        x = torch.from_numpy(case(32, 256, tile, "E2M1", generator(4)))
        q = Quantizer(E2M1, tile, rule, ROUNDING[stochastic])(x, seed() if stochastic else None)
        packed = pack(q.codes)
        assert np.array_equal(packed.numpy(), nibbles(q.codes.double().numpy()))
        assert torch.equal(unpack(packed).view(torch.uint8), q.codes.view(torch.uint8))


# --- outliers in the carrier ---


@cases
def test_carrier_codes_over_every_kind_of_number(case):
    for count, draw in itertools.product((0, 1, 3, 20), range(3)):
        x = case(24, 75, (1, -1), "E2M1", generator(draw))
        low, high = torch.ops.lowprec.outlier_bounds(torch.from_numpy(x), count)
        want_low, want_high = oracle.clamp_bounds(x, count)
        assert np.array_equal(low.numpy().ravel(), want_low.ravel())
        assert np.array_equal(high.numpy().ravel(), want_high.ravel())
        largest = torch.from_numpy(np.abs(x).max(axis=1, keepdims=True))
        got, scale = torch.ops.lowprec.quantize_carrier(torch.from_numpy(x), low, high, largest)
        with np.errstate(over="ignore"):
            want = oracle.carrier_codes(x, count)
        assert np.array_equal(scale.numpy(), want.scale)
        assert np.array_equal(codes(Quantized(got, scale)), oracle.encode(want.values, "E4M3"))


@pytest.mark.parametrize("body, outlier", [(0.0, 3e-9), (2.0**-126, 8.0), (1e-30, 1e9), (1.0, 1e38)])
def test_a_finite_outlier_is_not_clipped_however_large(body, outlier):
    x = torch.full((1, 32), body)
    x[0, 3], x[0, 9] = outlier, -outlier
    got, scale = torch.ops.lowprec.quantize_outliers(x, 1)
    assert got[0, [3, 9]].tolist() == [448.0, -448.0]
    assert 448 * scale.item() == pytest.approx(outlier, rel=2.0**-23)
