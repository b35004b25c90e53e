"""`quantize_expanded` against tests/oracle_expansion.py: COAT's dynamic range expansion (methods T11, 2.5).

The op takes logarithms and powers by FP32 polynomials, so the comparison says where it may differ: a code only if the
FP64 value is within NEAR, relatively, of a rounding boundary; an exponent only if floor()'s argument is within
STEP_NEAR of a step; scale and center within CLOSE; the way back within BACK max(1, 1 / k). Everything else is equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lowprec_train.ops  # noqa: F401
from tests import oracle
from tests import oracle_expansion as dre

F32, F64 = np.float32, np.float64
NEAR, STEP_NEAR, CLOSE, BACK = 3e-6, 1e-4, 1e-5, 2e-6
CARRIERS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
both = pytest.mark.parametrize("format", ["E4M3", "E5M2"])


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaussian(m: int, k: int) -> np.ndarray:
    return generator(0).standard_normal((m, k))


def lognormal(m: int, k: int) -> np.ndarray:
    """A second moment: positive, about one binade wide."""
    return np.exp(0.3 * generator(1).standard_normal((m, k)))


def broad(m: int, k: int) -> np.ndarray:
    return np.exp(3 * generator(2).standard_normal((m, k))) * generator(3).choice([-1, 1], (m, k))


def minute(m: int, k: int) -> np.ndarray:
    """Second moments of gradients near 1e-10."""
    return 1e-20 * generator(4).standard_normal((m, k)) ** 2


def scattered(m: int, k: int) -> np.ndarray:
    """Group scales over 60 binades, numbers over 12."""
    g = generator(5)
    return g.choice([-1, 1], (m, k)) * 2.0 ** (g.uniform(-30, 30, (m, 1)) + g.uniform(0, 12, (m, k)))


def wide(m: int, k: int) -> np.ndarray:
    """Ratios up to 2^80: k below 1."""
    g = generator(6)
    return g.choice([-1, 1], (m, k)) * 2.0 ** g.uniform(-40, 40, (m, k))


def zero_laden(m: int, k: int) -> np.ndarray:
    """One number in ten, zero rows, negative zeros."""
    x = gaussian(m, k) * (generator(7).random((m, k)) < 0.1)
    x[::5], x[:, ::3] = 0.0, x[:, ::3] * np.where(x[:, ::3] == 0, -1.0, 1.0)
    return x


def equal(m: int, k: int) -> np.ndarray:
    """One magnitude a row, of both signs."""
    return generator(8).choice([-1, 1], (m, k)) * 2.0 ** generator(9).uniform(-30, 30, (m, 1))


def nearly_equal(m: int, k: int) -> np.ndarray:
    return 1 + generator(10).integers(0, 5, (m, k)) * 2.0 ** -generator(11).integers(4, 23, (m, 1))


def single(m: int, k: int) -> np.ndarray:
    """One number among zeros, or a large one among alike."""
    x = np.where(np.arange(m)[:, None] % 2 == 0, 0.0, 1e-3 * (1 + 0.1 * gaussian(m, k)))
    x[np.arange(m), generator(12).integers(0, k, m)] = 1e4
    return x


def extreme(m: int, k: int) -> np.ndarray:
    """All of FP32: ratios up to 2^254, and subnormals, which count as zeros."""
    g = generator(13)
    return g.choice([-1, 1], (m, k)) * 2.0 ** g.uniform(-148, 127.9, (m, k))


def subnormal(m: int, k: int) -> np.ndarray:
    g = generator(14)
    return g.choice([-1, 1], (m, k)) * 2.0 ** g.uniform(-148, -120, (m, k))


def huge(m: int, k: int) -> np.ndarray:
    g = generator(15)
    return g.choice([-1, 1], (m, k)) * 2.0 ** g.uniform(100, 127.99, (m, k))


MATRICES = (gaussian, lognormal, broad, minute, scattered, wide, zero_laden, equal, nearly_equal, single)
MATRICES += (extreme, subnormal, huge)
# whole groups, segments with a rest, groups longer than a segment, of one number, of 16; fewer segments
SHAPES = [dre.Groups(k) for k in (2048, 1600, 1376, 512, 8, 1040)]
SHAPES += [dre.Groups(640, 16), dre.Groups(300, 128, 1), dre.Groups(87, 128, 1), dre.Groups(1376, 128, 4)]
matrices = pytest.mark.parametrize("matrix", MATRICES, ids=lambda f: f.__name__)


quantize, dequantize = torch.ops.lowprec.quantize_expanded, torch.ops.lowprec.dequantize_expanded


class Parts:
    """What the op returned, FP64: codes [m, k], the rest [m, groups]."""

    def __init__(self, x: np.ndarray, format: str, groups: dre.Groups) -> None:
        out = quantize(torch.from_numpy(x), format, groups.group, groups.segments)
        assert out[0].dtype == CARRIERS[format] and all(part.dtype == torch.float32 for part in out[1:])
        self.codes, self.scale, self.exponent, self.center = (part.double().numpy() for part in out)
        self.groups = groups
        self.back32 = dequantize(*out, format, groups.group, groups.segments)

    def back(self) -> np.ndarray:
        return dre.contract(self.codes, self.scale, self.exponent, self.center, self.groups)


def assert_same_exponent(got: np.ndarray, want: dre.Expanded) -> None:
    steps = got / dre.STEP
    assert np.array_equal(steps, np.round(steps))
    near = np.abs(want.steps - np.round(want.steps)) <= STEP_NEAR * np.maximum(1, want.steps / 16)
    allowed = (got == want.exponent) | (near & (np.abs(got - want.exponent) <= dre.STEP))
    assert allowed.all(), (got[~allowed], want.exponent[~allowed], want.steps[~allowed])


@both
@matrices
def test_is_the_oracles(matrix, format):
    for groups in SHAPES:
        x = matrix(12, groups.k).astype(F32)
        got, want = Parts(x, format, groups), dre.expand(x, format, groups)
        assert got.scale.shape == want.scale.shape
        assert_same_exponent(got.exponent, want)
        want = dre.expand(x, format, groups, got.exponent)
        np.testing.assert_allclose(got.scale, want.scale, rtol=CLOSE, atol=0)
        np.testing.assert_allclose(got.center, want.center, rtol=CLOSE, atol=0)
        low, high = dre.reachable(want.ratio, format, NEAR)
        magnitude = np.abs(got.codes)
        assert ((low <= magnitude) & (magnitude <= high)).all()
        assert (low != high).mean() < 0.01 or matrix in (equal, nearly_equal)
        assert np.array_equal(np.sign(got.codes), np.sign(oracle.to_grid(want.ratio, format)))


@both
@matrices
def test_the_largest_is_the_largest_code_and_nothing_is_flushed(matrix, format):
    """I2.1: M in every group that is not zero; the smallest number of a group keeps at least the code of M / B."""
    for groups in SHAPES:
        x = matrix(12, groups.k).astype(F32)
        got = Parts(x, format, groups)
        top = np.maximum.reduceat(np.abs(got.codes), groups.first, axis=1)
        filled = np.add.reduceat(np.abs(dre.normal(x)), groups.first, axis=1) > 0
        assert (top[filled] == oracle.largest(format)).all() and (top[~filled] == 0).all()
        assert np.array_equal(got.codes == 0, dre.normal(x) == 0)
        lowest = oracle.to_grid(np.array(2 / oracle.largest(format) * (1 - NEAR)), format)
        assert np.abs(got.codes[dre.normal(x) != 0]).min(initial=1) >= lowest


@both
@matrices
def test_k_is_the_largest_that_fits(matrix, format):
    """I2.2: ratio^k <= B < ratio^(k + 1/16), as logarithms."""
    bound = np.log2(oracle.largest(format) ** 2 / 2)
    for groups in SHAPES:
        x = matrix(12, groups.k).astype(F32)
        got = Parts(x, format, groups).exponent
        top, low = (part.astype(F64) for part in dre.extent(x, groups))
        distance = np.log2(top) - np.log2(low)
        assert (got * distance <= bound * (1 + 1e-5)).all()
        below = (got < dre.K_MAX) & (distance > 0)
        assert (((got + dre.STEP) * distance)[below] > bound * (1 - 1e-5)).all()


@matrices
def test_round_trip(matrix):
    """I2.3 and I2.4: signs, order and zeros kept. What is rounded, M / B at the least, moves by at most a fifth (from
    2.5 * 2^-9 to 2 or 3), and from 2^-6 on by at most 1/17; the power 1/k of that is the error."""
    for groups in SHAPES:
        x = matrix(12, groups.k).astype(F32)
        got = Parts(x, "E4M3", groups)
        back = got.back()
        x = dre.normal(x)
        assert np.array_equal(np.sign(back), np.sign(x)) and np.isfinite(back).all()
        power = groups.spread(got.exponent)
        with np.errstate(invalid="ignore", divide="ignore"):
            wrong = np.nan_to_num(np.abs(back / x - 1))
        slack = 1 + 1e-4
        fifth = np.maximum(1.2 ** (1 / power) - 1, 1 - 0.8 ** (1 / power))
        assert (wrong <= fifth * slack + 1e-6).all()
        normal = np.abs(dre.expand(x, "E4M3", groups, got.exponent).ratio) >= 2.0**-6
        assert (wrong <= ((1 + 1 / 16) ** (1 / power) - 1) * slack + 1e-6)[normal].all()
        for first, last in zip(groups.first, [*groups.first[1:], groups.k]):
            order = np.argsort(np.abs(x[:, first:last]), axis=1)
            assert (np.diff(np.take_along_axis(np.abs(got.codes[:, first:last]), order, axis=1)) >= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_stays_visible_in_its_group(bad):
    x = gaussian(6, 2048).astype(F32)
    clean = Parts(x, "E4M3", dre.Groups(2048))
    x[2, 300] = bad
    got = Parts(x, "E4M3", dre.Groups(2048))
    assert not torch.isfinite(got.back32[2, 256:384]).any()
    others = np.ones(x.shape, bool)
    others[2, 256:384] = False
    assert np.array_equal(got.codes[others], clean.codes[others])
    assert np.array_equal(got.back32.numpy()[others], clean.back32.numpy()[others])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("k", [2048, 1600, 1376])
def test_a_rank_has_the_bits_of_the_whole(k, ranks):
    """A shard of columns keeps its share of the segments; neither place nor the other rows change a bit."""
    x = torch.from_numpy(broad(6, k).astype(F32))
    whole = quantize(x, "E4M3", 128, 8)
    for rank in range(ranks):
        shard = x.chunk(ranks, dim=1)[rank].flip(0).contiguous()
        for a, b in zip(whole, quantize(shard, "E4M3", 128, 8 // ranks)):
            assert torch.equal(a.chunk(ranks, dim=1)[rank].float(), b.flip(0).float())


@both
@matrices
def test_the_way_back_is_the_oracles(matrix, format):
    for groups in SHAPES:
        got = Parts(matrix(12, groups.k).astype(F32), format, groups)
        want, power = got.back(), groups.spread(got.exponent)
        want = np.where(got.codes == 0, 0, np.copysign(np.maximum(np.abs(want), dre.SMALLEST), want))  # no x is smaller
        assert got.back32.dtype == torch.float32
        wrong = np.abs(got.back32.double().numpy() - want)
        assert (wrong <= BACK * np.maximum(1, 1 / power) * np.abs(want)).all()


@both
def test_every_code_under_every_exponent(format):
    """All 256 bytes less Inf and NaN, which no encoder makes, under each of the 1024 exponents; zeros are zeros."""
    groups = dre.Groups(2048, 256)
    g = generator(16)
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 8).view(CARRIERS[format])
    exponent = torch.arange(1, 1025).reshape(128, 8) * F32(dre.STEP)
    scale = torch.from_numpy(2.0 ** g.uniform(-9, -0.5, (128, 8))).float()
    center = torch.from_numpy(2.0 ** g.uniform(-30, 30, (128, 8))).float()
    got = dequantize(codes, scale, exponent, center, format, 256, 8).double().numpy()
    values = codes.double().numpy()
    with np.errstate(all="ignore"):
        want = dre.contract(values, scale.numpy(), exponent.numpy(), center.numpy(), groups)
    held = np.isfinite(values) & (np.abs(want) < 2.0**127) & ((np.abs(want) > 2.0**-125) | (want == 0))
    bound = BACK * np.maximum(1, 1 / groups.spread(exponent.numpy()))
    assert (np.abs(got - want)[held] <= (bound * np.abs(want))[held]).all()
    assert held.mean() > 0.95


@both
def test_beats_plain_rounding_when_the_ratio_is_small(format):
    """I2.5: k > 1 and a smaller error, for first and second moments."""
    for matrix in (gaussian, lognormal):
        x = matrix(64, 2048).astype(F32)
        x[np.abs(x) < 1e-3] = 1e-3
        wrong = np.sqrt(((Parts(x, format, dre.Groups(2048)).back() - x) ** 2).mean())
        plain = oracle.quantize(x, format, (1, 128)).exact
        assert wrong < 0.7 * np.sqrt(((plain - x) ** 2).mean())


# --- the oracle itself ---


@pytest.mark.parametrize("matrix, k, scale, error", [(gaussian, 1.875, 0.643, 0.0145), (lognormal, 7.4, 0.690, 0.0037)])
def test_the_oracle_has_the_published_medians(matrix, k, scale, error):
    x = matrix(64, 2048)
    e = dre.expand(x, "E4M3", dre.Groups(2048))
    back = dre.contract(oracle.to_grid(e.ratio, "E4M3"), e.scale, e.exponent, e.center, dre.Groups(2048))
    assert abs(np.median(e.exponent) / k - 1) < 0.02 and abs(np.median(e.scale) / scale - 1) < 0.02
    assert abs(np.sqrt(((back - x) ** 2).mean() / (x**2).mean()) / error - 1) < 0.05


def test_groups_restart_at_every_eighth():
    assert dre.Groups(1600).first.tolist()[:5] == [0, 128, 200, 328, 400]
    assert dre.Groups(1024).first.tolist() == list(range(0, 1024, 128))
    assert dre.Groups(8).first.tolist() == list(range(8))
    assert dre.Groups(300, 128, 1).first.tolist() == [0, 128, 256]
