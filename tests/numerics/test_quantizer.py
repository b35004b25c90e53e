"""The quantiser against tests/oracle.py, bit for bit, and the laws of methods T01 to T07 on their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, E5M2, FORMATS, FP16, FP32, INT8, Format, parse_format
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from tests import oracle
from tests.numerics.data import MATRICES, boundaries, heavy, huge, normal, tiny

SCALED = (E2M1, E4M3, E5M2, INT8, FP16)
TILES = [(-1, -1), (1, -1), (-1, 8), (1, 32), (1, 16), (16, 16), (32, 1), (8, -1)]
POWERS = (ScaleRule.POW2, ScaleRule.E8M0_FLOOR, ScaleRule.E8M0_CEIL)
SEED = 0x1234_5678_9ABC_DEF0
M, K = 32, 64


def seed(value: int = SEED) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


def origin(row: int, column: int) -> torch.Tensor:
    return torch.tensor([row, column], dtype=torch.int64)


def codes(q: Quantized) -> np.ndarray:
    """Bytes, the sign of zero included."""
    return q.codes.contiguous().view(torch.uint8).numpy() if q.codes.element_size() == 1 else q.codes.numpy()


def expected_codes(e: oracle.Rounded, format: Format) -> np.ndarray:
    if format is FP16:
        return e.values.astype(np.float16)
    return oracle.encode(e.values, oracle.CARRIERS.get(format.name, format.name))


def rules(format: Format) -> list[ScaleRule]:
    return [rule for rule in ScaleRule if rule is not ScaleRule.NVFP4 or format is E2M1]


def at_scale_one(values: np.ndarray, format: Format, **options) -> Quantized:
    """Quantised with the format's maximum beside them, whose power-of-two scale is 1. values [m, k] -> codes [m, k]"""
    column = np.full((len(values), 1), format.max)
    q = Quantizer(format, scale=ScaleRule.POW2, **options)
    x = torch.from_numpy(np.hstack([values, column]).astype(np.float32))
    got = q(x, seed() if q.stochastic else None)
    assert got.scale.item() == 1
    return Quantized(got.codes[:, :-1], got.scale)


def assert_equal_bits(q: Quantized, e: oracle.Rounded, format: Format, x: np.ndarray, tile: tuple[int, int]) -> None:
    """Codes everywhere; scales where the tile has a number in it."""
    occupied = np.abs(oracle.tiles(x, tile)).max(axis=(1, 3)) > 0
    np.testing.assert_array_equal(q.scale.numpy()[occupied], e.scale[occupied])
    assert torch.isfinite(q.scale).all() and (q.scale > 0).all()
    want = expected_codes(e, format)
    np.testing.assert_array_equal(codes(q), want)
    if want.dtype == np.float16:
        np.testing.assert_array_equal(np.signbit(codes(q)), np.signbit(want))


# --- formats and rounding to nearest (T01, T02, T03) ---


@pytest.mark.parametrize(
    "format, top, normal_, subnormal",
    [
        (E2M1, 6, 1.0, 0.5),
        (E4M3, 448, 2.0**-6, 2.0**-9),
        (E5M2, 57344, 2.0**-14, 2.0**-16),
        (FP16, 65504, 2.0**-14, 2.0**-24),
        (INT8, 127, 1.0, 1.0),
    ],
    ids=str,
)
def test_formats_are_their_bit_layouts(format, top, normal_, subnormal):
    table = oracle.TABLES[format.name]
    assert format.max == table[-1] == top
    assert table[1] == subnormal
    if format is not INT8:
        assert 2.0**format.min_exponent == normal_
        assert normal_ in table and subnormal == 2.0 ** (format.min_exponent - format.mantissa_bits)
    if format.grid:
        assert list(format.grid) == table.tolist()


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_every_code_comes_back_with_its_sign(format):
    values = np.concatenate([oracle.TABLES[format.name], -oracle.TABLES[format.name]])[None, :]
    q = at_scale_one(values, format)
    assert np.array_equal(codes(q), expected_codes(oracle.Rounded(values, np.ones((1, 1))), format))
    assert np.array_equal(q.dequantize().numpy(), values)
    again = at_scale_one(q.dequantize().numpy(), format)
    assert np.array_equal(codes(again), codes(q))


@pytest.mark.parametrize("format", [FP16, BF16], ids=str)
def test_fp4_codes_are_exact_in_wider_formats(format):
    values = np.concatenate([oracle.TABLES["E2M1"], -oracle.TABLES["E2M1"]])
    assert np.array_equal(oracle.to_grid(values, format.name), values)
    assert np.array_equal(oracle.to_grid(values, "E4M3"), values)
    assert np.array_equal(torch.from_numpy(values).to(format.carrier).double().numpy(), values)


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_ties_and_their_neighbours(format):
    table = oracle.TABLES[format.name]
    middle = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    values = np.concatenate([values, -values])[None, :]
    want = oracle.Rounded(oracle.to_grid(values, format.name), np.ones((1, 1)))
    got = at_scale_one(values, format)
    assert np.array_equal(codes(got), expected_codes(want, format))


def test_ties_of_e2m1_by_hand():
    x = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]])
    want = np.array([[0, 1, 1, 2, 2, 4, 4]])
    assert np.array_equal(at_scale_one(x, E2M1).dequantize().numpy(), want)
    assert np.array_equal(at_scale_one(-x, E2M1).dequantize().numpy(), -want)


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_small_numbers_keep_their_sign_when_they_round_to_zero(format):
    step = oracle.TABLES[format.name][1]
    x = np.array([[0.0, -0.0, step / 2, -step / 2, step * 0.51, -step * 0.51, 1e-45, -1e-45]])
    got = at_scale_one(x, format).codes.float().numpy()
    assert np.array_equal(got, [[0, 0, 0, 0, step, -step, 0, 0]])
    if format is not INT8:
        assert np.array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_floor_and_nearest_saturate_instead_of_overflowing(format):
    above = np.float32(2.0 ** (np.floor(np.log2(format.max)) + 1) * (1 - 2.0**-24))
    x = torch.tensor([[above, -above, float(np.nextafter(np.float32(format.max), np.float32(np.inf))), 0.0]])
    q = Quantizer(format, scale=ScaleRule.E8M0_FLOOR)(x)
    assert q.scale.item() == 1
    assert q.dequantize().tolist() == [[format.max, -format.max, format.max, 0.0]]


# --- every tile, rule and kind of number, bit for bit ---


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
        quantizer = Quantizer(format, tile, rule, stochastic)
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
        quantizer = Quantizer(E2M1, tile, rule, stochastic, span=span)
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
    quantizer = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, stochastic=True, span=14)
    x = heavy(m, k)
    got = quantizer(torch.from_numpy(x), seed(), origin(64, 8))
    bits = oracle.random_bits(SEED, m, k, (64, 8))
    assert_equal_bits(got, oracle.quantize(x, "E2M1", (1, 32), "E8M0_FLOOR", 3 / 4, 14, bits), E2M1, x, (1, 32))


def test_span_of_rows_at_the_bottom_of_fp32():
    x = tiny(M, K)
    got = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_CEIL, span=14)(torch.from_numpy(x))
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
    quantizer = Quantizer(E2M1, (1, 16), stochastic=True)
    a, b = quantizer(x, seed()), quantizer(x.contiguous(), seed())
    assert np.array_equal(codes(a), codes(b)) and torch.equal(a.scale, b.scale)


# --- scales (T06) ---


def exponent_of(rule: ScaleRule, amax: float) -> int:
    scale = Quantizer(E2M1, (1, 32), rule)(torch.full((1, 32), -amax)).scale.item()
    mantissa, exponent = np.frexp(scale)
    assert mantissa == 0.5
    return int(exponent) - 1


BELOW = 1 - 2.0**-24


@pytest.mark.parametrize("shift", [-100, -20, -1, 0, 1, 20, 100])
@pytest.mark.parametrize(
    "amax, floor, ceil",
    [
        (4.0, 0, 0),
        (4.0 * BELOW, -1, 0),
        (3.0, -1, -1),
        (3.0 * (1 + 2.0**-22), -1, 0),
        (6.0, 0, 0),
        (6.0 * (1 - 2.0**-23), 0, 0),
        (6.0 * (1 + 2.0**-22), 0, 1),
        (8.0, 1, 1),
        (8.0 * BELOW, 0, 1),
        (1.0, -2, -2),
        (1.0 * BELOW, -3, -2),
    ],
)
def test_mx_exponents_at_powers_of_two(amax, floor, ceil, shift):
    assert exponent_of(ScaleRule.E8M0_FLOOR, amax * 2.0**shift) == floor + shift
    assert exponent_of(ScaleRule.E8M0_CEIL, amax * 2.0**shift) == ceil + shift
    assert exponent_of(ScaleRule.POW2, amax * 2.0**shift) == ceil + shift


@pytest.mark.parametrize("matrix", [normal, heavy, boundaries], ids=lambda f: f.__name__)
def test_mx_ranges(matrix):
    x = matrix(M, K)
    amax = np.abs(oracle.tiles(x, (1, 32))).max(axis=(1, 3)).astype(np.float64)
    ratio = {r: amax / Quantizer(E2M1, (1, 32), r)(torch.from_numpy(x)).scale.double().numpy() for r in POWERS}
    assert (ratio[ScaleRule.E8M0_FLOOR] >= 4).all() and (ratio[ScaleRule.E8M0_FLOOR] < 8).all()
    assert (ratio[ScaleRule.E8M0_CEIL] > 3).all() and (ratio[ScaleRule.E8M0_CEIL] <= 6).all()


@pytest.mark.parametrize("format", SCALED, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_scale_has_a_number_per_tile(format, tile):
    x = torch.from_numpy(normal(M, K))
    rows, columns = (M if tile[0] == -1 else tile[0]), (K if tile[1] == -1 else tile[1])
    for rule in rules(format):
        q = Quantizer(format, tile, rule)(x)
        assert q.scale.shape == (M // rows, K // columns) and q.scale.dtype == torch.float32
        assert q.codes.shape == x.shape and q.codes.dtype == format.carrier
        want = q.codes.double().numpy() * oracle.spread(q.scale.double().numpy(), (M, K))
        assert np.array_equal(q.dequantize().numpy(), want.astype(np.float32))
        back = q.t()
        assert torch.equal(back.dequantize(), q.dequantize().t()) and back.codes.is_contiguous()


@pytest.mark.parametrize("tile, name", [((-1, -1), "tensor"), ((1, -1), "row"), ((1, 32), "block"), ((1, 64), "row")])
def test_granularity(tile, name):
    q = Quantizer(E2M1, tile)(torch.from_numpy(normal(M, K)))
    assert q.granularity == name


@pytest.mark.parametrize("format", SCALED, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_zeros_are_zeros(format, tile):
    x = torch.zeros(M, K)
    for rule in rules(format):
        q = Quantizer(format, tile, rule)(x)
        assert torch.equal(q.dequantize(), x) and (q.scale == 1).all()
        q = Quantizer(format, tile, rule, stochastic=True)(x, seed())
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
        quantizer = Quantizer(format, tile, rule, stochastic)
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
    got = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, True, span=span)(x, seed()).dequantize()
    assert not torch.isfinite(got[5, 20])
    assert torch.isfinite(got[torch.arange(M) != 5]).all()


# --- stochastic rounding (T04, T05) ---


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_stochastic_mean_and_variance(format):
    draws = 1024
    table = oracle.TABLES[format.name]
    g = np.random.default_rng(3)
    index = g.integers(0, len(table) - 1, 48)
    place = g.uniform(0.02, 0.98, 48)
    x = (table[index] + place * (table[index + 1] - table[index])).astype(np.float32) * g.choice([-1, 1], 48)
    q = at_scale_one(np.tile(x, (draws, 1)), format, stochastic=True).dequantize().double().numpy()

    x = x.astype(np.float64)
    gap = table[index + 1] - table[index]
    p = (np.abs(x) - table[index]) / gap
    assert np.isin(np.abs(q), table).all() and (np.abs(q - x) < gap).all()
    variance = gap**2 * p * (1 - p)  # (c - x)(x - f)
    z = (q.mean(0) - x) / np.sqrt(variance / draws)
    assert np.abs(z).max() < 4.5 and 0.5 < (z**2).mean() < 1.7
    error = ((q - x) ** 2).mean(0) - variance
    spread = gap**2 * np.sqrt(p * (1 - p) / draws) * np.abs(1 - 2 * p)
    assert (np.abs(error) < 4.5 * spread + 1e-4 * variance).all()


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_stochastic_rounding_leaves_the_grid_alone(format):
    table = oracle.TABLES[format.name]
    values = np.tile(np.concatenate([table, -table])[:512], (16, 1))
    assert np.array_equal(at_scale_one(values, format, stochastic=True).dequantize().numpy(), values)


def test_neighbouring_draws_are_not_correlated():
    x = np.full((1000, 64), 0.25)
    up = at_scale_one(x, E2M1, stochastic=True).dequantize().double().numpy() * 4 - 1  # +-1
    n = up.size
    for shift in (1, 2, 8):
        assert abs((up[:, shift:] * up[:, :-shift]).mean()) < 4.5 / np.sqrt(n)
        assert abs((up[shift:] * up[:-shift]).mean()) < 4.5 / np.sqrt(n)


def test_same_seed_same_bits_other_seed_other_bits():
    x = torch.from_numpy(normal(M, K))
    quantizer = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, stochastic=True)
    first, again, other = quantizer(x, seed()), quantizer(x, seed()), quantizer(x, seed(SEED + 1))
    assert np.array_equal(codes(first), codes(again))
    high = quantizer(x, seed(SEED ^ 1 << 40))
    for different in (other, high):
        assert 0.2 < (codes(first) != codes(different)).mean() < 0.8
        assert torch.equal(first.scale, different.scale)
    torch.manual_seed(99)
    assert np.array_equal(codes(first), codes(quantizer(x, seed())))


@pytest.mark.parametrize("cut", [8, 16, 24])
def test_a_shard_draws_what_the_whole_draws(cut):
    x = torch.from_numpy(normal(M, K))
    quantizer = Quantizer(E2M1, (1, 8), stochastic=True)
    whole = codes(quantizer(x, seed()))
    rows = [codes(quantizer(x[:cut], seed(), origin(0, 0))), codes(quantizer(x[cut:], seed(), origin(cut, 0)))]
    assert np.array_equal(np.vstack(rows), whole)
    columns = [codes(quantizer(x[:, :cut], seed())), codes(quantizer(x[:, cut:], seed(), origin(0, cut)))]
    assert np.array_equal(np.hstack(columns), whole)
    assert not np.array_equal(codes(quantizer(x[cut:], seed())), whole[cut:])


def test_origins_reach_the_oracle():
    x = heavy(M, K)
    quantizer = Quantizer(E4M3, (1, 32), ScaleRule.POW2, stochastic=True)
    place = (3_000_000_001, 4096)
    got = quantizer(torch.from_numpy(x), seed(), origin(*place))
    bits = oracle.random_bits(SEED, M, K, place)
    assert_equal_bits(got, oracle.quantize(x, "E4M3", (1, 32), "POW2", bits=bits), E4M3, x, (1, 32))


def test_mxfp4_stochastic_is_unbiased_and_never_clips():
    draws, rows = 250, 8
    x = normal(rows, 32).astype(np.float64)
    x[0] *= 1e-3
    x[1, 0] = 7.999 * np.abs(x[1]).max()
    tall = torch.from_numpy(np.tile(x, (draws, 1)).astype(np.float32))
    q = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, stochastic=True)(tall, seed())
    assert q.gain == pytest.approx(4 / 3)
    scale = q.scale.double().numpy()
    assert (np.abs(tall.numpy()).max(1, keepdims=True) / scale < 6).all()
    assert np.isin(np.frexp(scale * 0.75)[0].round(6), [0.5]).all()
    got = q.dequantize().double().numpy().reshape(draws, rows, 32)
    ratio = np.abs(x.astype(np.float32)) / scale[:rows]
    below, above = oracle.neighbours(ratio, oracle.TABLES["E2M1"])
    table = oracle.TABLES["E2M1"]
    sigma = scale[:rows] * np.sqrt((table[above] - ratio) * (ratio - table[below]) / draws)
    moving = sigma > 1e-3 * scale[:rows]
    z = ((got.mean(0) - x) / np.where(moving, sigma, 1))[moving]
    assert np.abs(z).max() < 4.5 and 0.7 < (z**2).mean() < 1.4
    slope = (got.mean(0) * x).sum() / (x * x).sum()
    assert abs(slope - 1) < 0.01


def test_mx_block_with_one_denormal():
    x = torch.zeros(1, 64)
    x[0, 3], x[0, 40] = 1e-45, 1.0
    q = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, stochastic=True)(x, seed())
    assert torch.isfinite(q.dequantize()).all() and torch.isfinite(q.scale).all()
    assert q.dequantize()[0, :32].abs().max() < 1e-35


# --- NVFP4 (T07) ---


@pytest.mark.parametrize("matrix", [normal, heavy, boundaries], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4_scales(matrix, stochastic):
    x = matrix(M, K)
    q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, stochastic)(torch.from_numpy(x), seed() if stochastic else None)
    block, tensor = q.parts["block"].double().numpy(), q.parts["tensor"].double().numpy()
    assert q.parts["block"].dtype == torch.float8_e4m3fn and q.parts["tensor"].dtype == torch.float32
    assert np.array_equal(q.scale.numpy(), (block * tensor).astype(np.float32))
    amax = np.abs(oracle.tiles(x, (1, 16))).max(axis=(1, 3)).astype(np.float64)
    assert block.max() == 448 and block.ravel()[amax.argmax()] == 448
    if stochastic:
        assert (amax / q.scale.double().numpy() <= 6 * (1 + 2.0**-22)).all()
    else:
        normal_range = block >= 2.0**-6
        assert (np.abs(6 * q.scale.double().numpy() / amax - 1)[normal_range] <= 1 / 16).all()


@pytest.mark.parametrize("rule", list(ScaleRule), ids=lambda r: r.name)
def test_square_blocks_of_a_transpose(rule):
    w = torch.from_numpy(heavy(M, K))
    quantizer = Quantizer(E2M1, (16, 16), rule)
    straight, turned = quantizer(w), quantizer(w.t().contiguous())
    assert np.array_equal(codes(straight).T, codes(turned))
    assert torch.equal(straight.scale.t(), turned.scale)


def test_nvfp4_blocks_have_no_floor_at_the_smallest_normal():
    """A block far below the tensor's largest keeps its values instead of growing to E4M3's smallest normal scale."""
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-5
    q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4)(x)
    assert abs(q.dequantize()[0, 20].item() / 1e-5 - 1) < 0.2


# --- refusals ---


def test_seed_is_required_exactly_when_stochastic():
    x = torch.ones(32, 32)
    with pytest.raises(ValueError, match="seed"):
        Quantizer(E2M1, stochastic=True)(x)
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
    with pytest.raises(ValueError, match="span"):
        Quantizer(E2M1, (1, 32), ScaleRule.FP32, span=14)


def test_unknown_names():
    with pytest.raises(ValueError, match="E3M4"):
        parse_format("E3M4")
    assert all(parse_format(name) is format for name, format in FORMATS.items())
    with pytest.raises(ValueError):
        ScaleRule("OCP")
