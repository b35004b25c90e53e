"""MX blocks in FP8 carriers: bit exact inside the span, nothing flushed below it (methods S6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lowprec_train.numerics.quantizer
from lowprec_train.numerics.formats import E2M1, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from tests import oracle
from tests.numerics.data import normal
from tests.numerics.quantized import ROUNDING

assert lowprec_train.numerics.quantizer  # registers the ops
SPANS = {"E5M2": 28, "E4M3": 14}
DTYPES = {"E5M2": torch.float8_e5m2, "E4M3": torch.float8_e4m3fn}
SEED = torch.tensor(31, dtype=torch.int64)


def spread_blocks(m: int, blocks: int, step: int) -> np.ndarray:
    """Rows whose blocks of 32 lie `step` binades apart, in an order of their own."""
    g = np.random.default_rng(5)
    exponents = np.stack([g.permutation(blocks) for _ in range(m)]) * -step
    return (normal(m, 32 * blocks) * np.ldexp(1.0, exponents).repeat(32, axis=1)).astype(np.float32)


def quantizer(carrier: str, stochastic: bool = True) -> Quantizer:
    rule = ScaleRule.E8M0_FLOOR if stochastic else ScaleRule.E8M0_CEIL
    return Quantizer(E2M1, (1, 32), rule, ROUNDING[stochastic], exponent_span=SPANS[carrier])


def fold(codes: torch.Tensor, scale: torch.Tensor, carrier: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.lowprec.fold(codes, scale, carrier)


@pytest.mark.parametrize("carrier", SPANS)
def test_every_code_at_every_shift(carrier):
    """All 15 values in blocks 0 .. span binades below their row's largest."""
    span = SPANS[carrier]
    grid = np.concatenate([oracle.TABLES["E2M1"], -oracle.TABLES["E2M1"]])
    codes = torch.from_numpy(np.tile(np.repeat(grid, 2), (3, span + 1))).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(np.tile(np.ldexp(4 / 3, -np.arange(span + 1)), (3, 1))).float()
    scale *= torch.tensor([[1.0], [2.0**-40], [2.0**60]])
    got, row = fold(codes, scale, carrier)
    want = codes.double().numpy() * oracle.spread(scale.double().numpy(), codes.shape)
    assert got.dtype == DTYPES[carrier] and row.shape == (3, 1) and row.dtype == torch.float32
    assert np.array_equal(got.double().numpy() * row.double().numpy(), want)
    assert got.double().abs().max() == 6 * 2.0 ** oracle.FOLD_TOP[carrier] <= oracle.largest(carrier)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("carrier", SPANS)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_carriers_are_bit_exact(carrier, stochastic, step):
    x = spread_blocks(16, 8, step)
    q = quantizer(carrier, stochastic)(torch.from_numpy(x), SEED if stochastic else None)
    got, row = fold(q.codes, q.scale, carrier)
    assert np.array_equal(
        got.double().numpy() * row.double().numpy(),
        q.codes.double().numpy() * oracle.spread(q.scale.double().numpy(), x.shape),
    )
    want = oracle.fold(q.codes.double().numpy(), q.scale.numpy(), carrier)
    assert np.array_equal(got.view(torch.uint8).numpy(), oracle.encode(want.values, carrier))
    assert np.array_equal(row.numpy(), want.scale)
    assert np.array_equal(got.float().numpy() != 0, q.codes.float().numpy() != 0)


@pytest.mark.parametrize("carrier", SPANS)
def test_exponents_stay_within_the_span(carrier):
    q = quantizer(carrier)(torch.from_numpy(spread_blocks(16, 8, 9)), SEED)
    exponents = oracle.floor_log2(q.scale.numpy())
    reach = exponents.max(1) - exponents.min(1)
    assert (reach == SPANS[carrier]).all() and q.exponent_span == SPANS[carrier]


@pytest.mark.parametrize("carrier", SPANS)
def test_blocks_within_the_span_are_left_alone(carrier):
    x = torch.from_numpy(spread_blocks(16, 8, 1))
    free = Quantizer(E2M1, (1, 32), ScaleRule.E8M0_FLOOR, rounding=STOCHASTIC)(x, SEED)
    bound = quantizer(carrier)(x, SEED)
    assert torch.equal(free.scale, bound.scale) and torch.equal(free.codes.float(), bound.codes.float())


@pytest.mark.parametrize("carrier", SPANS)
def test_stochastic_rounding_stays_unbiased_below_the_span(carrier):
    """Blocks 2 and 4 binades under the lowest permitted exponent: codes of 0 and +-0.5, the mean still x."""
    draws = 600
    x = normal(1, 96)
    x[0, 32:64] *= 2.0 ** -(SPANS[carrier] + 2)
    x[0, 64:] *= 2.0 ** -(SPANS[carrier] + 4)
    q = quantizer(carrier)(torch.from_numpy(np.tile(x, (draws, 1))), SEED)
    codes, row = fold(q.codes, q.scale, carrier)
    got = codes.double().numpy() * row.double().numpy()
    step = 0.5 * q.scale[0, 1].double().item()
    low = x[0, 32:].astype(np.float64)
    p = np.abs(low) / step % 1
    z = (got[:, 32:].mean(0) - low) / (step * np.sqrt(p * (1 - p) / draws))
    assert np.abs(z).max() < 4.5 and 0.6 < (z**2).mean() < 1.6
    slope = (got[:, 32:].mean(0) * low).sum() / (low**2).sum()
    assert abs(slope - 1) < 0.05
    assert (got[:, 32:] != 0).any(axis=0).mean() > 0.9


@pytest.mark.parametrize("carrier", SPANS)
def test_zero_rows_and_blocks(carrier):
    x = spread_blocks(4, 4, 3)
    x[0], x[1, :32] = 0, 0
    q = quantizer(carrier)(torch.from_numpy(x), SEED)
    got, row = fold(q.codes, q.scale, carrier)
    back = got.float() * row
    assert torch.isfinite(row).all() and (row > 0).all()
    assert not back[0].any() and not back[1, :32].any() and torch.equal(back, q.dequantize())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("carrier", SPANS)
def test_non_finite_stays_visible(carrier, bad):
    x = spread_blocks(4, 4, 3)
    x[2, 40] = bad
    q = quantizer(carrier)(torch.from_numpy(x), SEED)
    got, row = fold(q.codes, q.scale, carrier)
    back = got.float() * row
    assert not torch.isfinite(back[2, 40]) and torch.isfinite(back[[0, 1, 3]]).all()
