"""Stochastic rounding: unbiased, of the right variance, a function of seed and place (methods T04 and T05)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import E2M1, E4M3, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from tests import oracle
from tests.numerics.data import heavy, normal
from tests.numerics.quantized import SCALED, SEED, K, M, assert_equal_bits, at_scale_one, codes, origin, seed


@pytest.mark.parametrize("format", SCALED, ids=str)
def test_stochastic_mean_and_variance(format):
    draws = 1024
    table = oracle.TABLES[format.name]
    g = np.random.default_rng(3)
    index = g.integers(0, len(table) - 1, 48)
    place = g.uniform(0.02, 0.98, 48)
    x = (table[index] + place * (table[index + 1] - table[index])).astype(np.float32) * g.choice([-1, 1], 48)
    q = at_scale_one(np.tile(x, (draws, 1)), format, rounding=STOCHASTIC).dequantize().double().numpy()

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
    assert np.array_equal(at_scale_one(values, format, rounding=STOCHASTIC).dequantize().numpy(), values)


def test_neighbouring_draws_are_not_correlated():
    x = np.full((1000, 64), 0.25)
    up = at_scale_one(x, E2M1, rounding=STOCHASTIC).dequantize().double().numpy() * 4 - 1  # +-1
    n = up.size
    for shift in (1, 2, 8):
        assert abs((up[:, shift:] * up[:, :-shift]).mean()) < 4.5 / np.sqrt(n)
        assert abs((up[shift:] * up[:-shift]).mean()) < 4.5 / np.sqrt(n)


def test_same_seed_same_bits_other_seed_other_bits():
    x = torch.from_numpy(normal(M, K))
    quantizer = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC)
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
    quantizer = Quantizer(E2M1, (1, 8), rounding=STOCHASTIC)
    whole = codes(quantizer(x, seed()))
    rows = [codes(quantizer(x[:cut], seed(), origin(0, 0))), codes(quantizer(x[cut:], seed(), origin(cut, 0)))]
    assert np.array_equal(np.vstack(rows), whole)
    columns = [codes(quantizer(x[:, :cut], seed())), codes(quantizer(x[:, cut:], seed(), origin(0, cut)))]
    assert np.array_equal(np.hstack(columns), whole)
    assert not np.array_equal(codes(quantizer(x[cut:], seed())), whole[cut:])


def test_origins_reach_the_oracle():
    x = heavy(M, K)
    quantizer = Quantizer(E4M3, (1, 32), ScaleRule.POW2, rounding=STOCHASTIC)
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
    q = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC)(tall, seed())
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
    q = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC)(x, seed())
    assert torch.isfinite(q.dequantize()).all() and torch.isfinite(q.scale).all()
    assert q.dequantize()[0, :32].abs().max() < 1e-35
