"""Outlier clamping and compensation against sorting (methods 1.3, S8, T10)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import E2M1, E4M3
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.precision.outliers import OutlierClamp, Residual
from tests import oracle
from tests.numerics.data import MATRICES, heavy, normal

ROW = Quantizer(E2M1, (1, -1))
QUANTILES = [1.0, 0.999, 0.99, 0.97, 0.9, 0.75]


def clamp(x: np.ndarray | torch.Tensor, quantile: float, variant: str) -> tuple[Quantized, Residual | None]:
    return OutlierClamp(quantile, variant)(torch.as_tensor(x), ROW, None, None)


def activations(m: int = 64, k: int = 512) -> np.ndarray:
    """Heavy tails and the same few hidden channels large for every token; BF16 values."""
    g = np.random.default_rng(8)
    x = g.standard_t(4, (m, k))
    x[:, g.choice(k, 6, replace=False)] *= g.uniform(8, 40, 6)
    return oracle.bf16(x).astype(np.float32)


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("k", [10, 32, 64, 100, 128, 1000, 4096])
def test_how_many_are_clipped(quantile, k):
    count = OutlierClamp(quantile).clipped(k)
    assert count == oracle.clipped(quantile, k)
    assert 2 * count / k <= 2 * (1 - quantile) + 2 / k


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("name", MATRICES)
def test_bounds_are_order_statistics(quantile, name):
    x = MATRICES[name](16, 200)
    low, high = OutlierClamp(quantile).bounds(torch.from_numpy(x))
    want = oracle.clamp_bounds(x, oracle.clipped(quantile, 200))
    assert low.dtype == torch.float32 and low.shape == high.shape == (16, 1)
    assert np.array_equal(low.numpy(), want[0]) and np.array_equal(high.numpy(), want[1])


@pytest.mark.parametrize("quantile", QUANTILES)
@pytest.mark.parametrize("name", [n for n in MATRICES if n not in ("huge", "tiny")])
def test_carrier_codes_are_the_oracles(quantile, name):
    x = MATRICES[name](16, 200)
    q, residual = clamp(x, quantile, "carrier")
    want = oracle.carrier_codes(x, oracle.clipped(quantile, 200))
    assert residual is None and q.codes.dtype == torch.float8_e4m3fn and q.scale.shape == (16, 1)
    assert np.array_equal(q.codes.view(torch.uint8).numpy(), oracle.encode(want.values, "E4M3"))
    assert np.array_equal(q.scale.numpy(), want.scale)


@pytest.mark.parametrize("quantile", [0.99, 0.9])
def test_the_body_in_the_carrier_is_the_plain_quantisers(quantile):
    x = activations()
    low, high = oracle.clamp_bounds(x, oracle.clipped(quantile, x.shape[1]))
    inside = (x >= low) & (x <= high)
    q, _ = clamp(x, quantile, "carrier")
    plain = ROW(torch.from_numpy(np.clip(x, low, high)))
    assert np.array_equal(q.dequantize().numpy()[inside], plain.dequantize().numpy()[inside])
    error = np.abs(q.dequantize().double().numpy() - x)[~inside]
    step = (q.scale.double().numpy() * 2.0**-9).repeat(x.shape[1], axis=1)[~inside]  # of E4M3's subnormals
    assert (error <= np.maximum(2.0**-4 * np.abs(x[~inside]), step / 2)).all()


@pytest.mark.parametrize("quantile", QUANTILES)
def test_the_split_is_exact_and_sparse(quantile):
    x = activations()
    q, residual = clamp(x, quantile, "residual")
    count = oracle.clipped(quantile, x.shape[1])
    body = oracle.body(x, quantile)
    dense = residual.dense(torch.float32).numpy()
    assert residual.values.dtype == torch.float32 and residual.columns.dtype == torch.int64
    assert residual.values.shape == residual.columns.shape == (64, 2 * count) and residual.k == 512
    assert np.array_equal(body.astype(np.float64) + dense.astype(np.float64), x)
    assert np.array_equal(dense != 0, x != body)
    assert (dense != 0).mean() <= 2 * (1 - quantile) + 2 / 512
    assert torch.equal(q.dequantize(), ROW(torch.from_numpy(body)).dequantize())


@pytest.mark.parametrize("variant", ["carrier", "residual"])
@pytest.mark.parametrize("name", ["normal", "heavy", "sparse", "boundaries"])
def test_a_quantile_of_one_clamps_nothing(variant, name):
    x = MATRICES[name](16, 200)
    q, residual = clamp(x, 1.0, variant)
    assert torch.equal(q.dequantize(), ROW(torch.from_numpy(x)).dequantize())
    assert residual is None or not residual.dense(torch.float32).any()


def test_repeated_values_count_once():
    """Rows of one value, and outliers that tie with their bound, have nothing outside."""
    x = np.full((2, 100), 3.0, np.float32)
    x[1, :3] = 7.0
    _, residual = clamp(x, 0.97, "residual")
    dense = residual.dense(torch.float32).numpy()
    assert not dense[0].any() and np.array_equal(dense[1], np.where(x[1] == 7, 4.0, 0.0))


def snr(x: np.ndarray, back: np.ndarray) -> float:
    return 10 * np.log10((x.astype(np.float64) ** 2).sum() / ((x - back.astype(np.float64)) ** 2).sum())


@pytest.mark.parametrize("variant", ["carrier", "residual"])
def test_more_compensation_less_error(variant):
    x = activations()
    ratios = []
    for quantile in (1.0, 0.999, 0.99, 0.97):
        q, residual = clamp(x, quantile, variant)
        back = q.dequantize().numpy()
        ratios.append(snr(x, back if residual is None else back + residual.dense(torch.float32).numpy()))
    assert ratios == sorted(ratios) and ratios[2] > ratios[0] + 3


@pytest.mark.parametrize("ratio", [30.0, 75.0, 1000.0, 19_000.0])
def test_the_carrier_has_head_room(ratio):
    """448 * 2^8 / 6 = 19,114 times the clamp."""
    x = normal(8, 200)
    edge = np.abs(oracle.clamp_bounds(x, 2)).max(axis=0)[:, 0]
    x[:, 17] = ratio * edge
    x[:, 90] = -ratio * edge
    low, high = oracle.clamp_bounds(x, 2)
    limit = np.maximum(np.abs(low), np.abs(high))[:, 0]
    x[:, 17], x[:, 90] = ratio * limit, -ratio * limit
    q, _ = clamp(x, 0.99, "carrier")
    back = q.dequantize().double().numpy()
    assert (np.abs(back[:, [17, 90]] / x[:, [17, 90]] - 1) <= 2.0**-4).all()
    assert (q.codes.float().abs() < 448).all() or ratio > 15_000


def test_a_larger_outlier_raises_the_scale():
    """By hand: bounds of 6 and -6. 2^18 is 43,690 times as much, so s0 is 2^18 / (448 * 2^8) = 2.286 instead of 1, and
    s is 2^18 / 448. Codes are 448, -112 and, from 6 / s0 = 2.625, which rounds to 3, six of E4M3's smallest steps.
    """
    x = torch.zeros(1, 32)
    x[0, 10:14], x[0, 3], x[0, 20] = torch.tensor([6.0, -6.0, 6.0, -6.0]), 2.0**18, -(2.0**16)
    q, _ = clamp(x, 0.96, "carrier")  # one on each side
    want = torch.zeros(1, 32)
    want[0, 10:14], want[0, 3], want[0, 20] = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 3 * 2.0**-8, 448.0, -112.0
    assert torch.equal(q.codes.float(), want) and q.scale.item() == np.float32(2.0**18 / 448)


def test_outliers_over_zeros_have_a_scale_of_their_own():
    """By hand: the largest magnitude is 448 / 16, so s is 1 / 16 and codes are 16 x in E4M3, whose steps are 32 from
    256, 2 from 16, 1/8 from 1 and 2^-9 below 2^-6. In a second row all of it is 2^-40 times as large.
    """
    x, codes = torch.zeros(1, 200), torch.zeros(1, 200)
    values = torch.tensor([-28.0, 17.1, 1.0, 1.1, -0.08, 2.0**-11, 2.0**-13, 2.0**-14])
    rounded = torch.tensor([-448.0, 288.0, 16.0, 18.0, -1.25, 2.0**-7, 2.0**-9, 0.0])  # the last is a tie
    x[0, 11::24], codes[0, 11::24] = values, rounded
    q, _ = clamp(torch.cat([x, x * 2.0**-40]), 0.96, "carrier")  # eight on each side
    assert torch.equal(q.codes.float(), codes.expand(2, -1)) and q.scale.tolist() == [[2.0**-4], [2.0**-44]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outliers_over_zeros_are_those_of_e4m3_in_rows(dtype):
    """Without a body a row has the bits of the FP8 quantiser: no value is worse off than there."""
    x = torch.from_numpy(heavy(64, 200)).clamp(-6e4, 6e4) * (torch.arange(200) % 25 == 3)
    x = (x * 2.0 ** torch.arange(-12, 4).repeat(4)[:, None]).clamp(-6e4, 6e4).to(dtype)
    q, _ = clamp(x, 0.96, "carrier")
    plain = Quantizer(E4M3, (1, -1))(x)
    assert torch.equal(q.scale, plain.scale)
    assert torch.equal(q.codes.view(torch.uint8), plain.codes.view(torch.uint8))


def test_rows_of_zeros():
    x = np.zeros((3, 128), np.float32)
    x[1, 5] = 2.0  # an outlier over a body of zeros
    for variant in ("carrier", "residual"):
        q, residual = clamp(x, 0.99, variant)
        back = q.dequantize().numpy()
        assert np.isfinite(back).all() and not back[[0, 2]].any()
        if residual is not None:
            assert np.array_equal(back + residual.dense(torch.float32).numpy(), x)
        else:
            assert back[1, 5] == 2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("variant", ["carrier", "residual"])
@pytest.mark.parametrize("count", [1, 5])
def test_non_finite_stays_visible_in_its_row(bad, variant, count):
    x = heavy(8, 128)
    clean, _ = clamp(x, 0.99, variant)
    x[3, :count] = bad
    q, residual = clamp(x, 0.99, variant)
    back = q.dequantize()
    if residual is not None:
        back = back + residual.dense(torch.float32)
        clean = Quantized(clean.codes, clean.scale)
    assert not torch.isfinite(back[3]).all()
    others = torch.arange(8) != 3
    assert torch.equal(q.dequantize()[others], clean.dequantize()[others])


@pytest.mark.parametrize("quantile", [0.5, 0.0, 1.01, -1.0])
def test_the_quantile_is_above_one_half(quantile):
    with pytest.raises(ValueError, match=str(quantile)):
        OutlierClamp(quantile)


def test_unknown_variant():
    with pytest.raises(ValueError, match="sparse"):
        OutlierClamp(0.99, "sparse")
