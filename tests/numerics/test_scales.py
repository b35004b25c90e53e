"""Scales of every rule: exponents at powers of two, one number a tile, NVFP4's two levels (methods T06, T07)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from tests import oracle
from tests.numerics.data import boundaries, heavy, normal
from tests.numerics.quantized import POWERS, ROUNDING, SCALED, TILES, K, M, codes, rules, seed


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


# --- NVFP4 ---


@pytest.mark.parametrize("matrix", [normal, heavy, boundaries], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4_scales(matrix, stochastic):
    x = matrix(M, K)
    q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, ROUNDING[stochastic])(
        torch.from_numpy(x), seed() if stochastic else None
    )
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


@pytest.mark.parametrize("rule", rules(E2M1), ids=lambda r: r.name)
def test_square_blocks_of_a_transpose(rule):
    w = torch.from_numpy(heavy(M, K))
    quantizer = Quantizer(E2M1, (16, 16), rule)
    straight, transposed = quantizer(w), quantizer(w.t().contiguous())
    assert np.array_equal(codes(straight).T, codes(transposed))
    assert torch.equal(straight.scale.t(), transposed.scale)


def test_nvfp4_blocks_have_no_floor_at_the_smallest_normal():
    """A block far below the tensor's largest keeps its values instead of growing to E4M3's smallest normal scale."""
    x = torch.ones(1, 32)
    x[0, 16:] = 1e-5
    q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4)(x)
    assert abs(q.dequantize()[0, 20].item() / 1e-5 - 1) < 0.2
