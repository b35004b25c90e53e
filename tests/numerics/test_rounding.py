"""The formats, and rounding to nearest at scale 1: grids, ties, signs of zero, saturation (methods T01 to T03)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, E5M2, FORMATS, FP16, INT4, INT8
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.case_inputs import ties
from tests import oracle
from tests.numerics.quantized import SCALED, at_scale_one, codes, expected_codes


@pytest.mark.parametrize(
    "format, top, normal_, subnormal",
    [
        (E2M1, 6, 1.0, 0.5),
        (E4M3, 448, 2.0**-6, 2.0**-9),
        (E5M2, 57344, 2.0**-14, 2.0**-16),
        (FP16, 65504, 2.0**-14, 2.0**-24),
        (INT4, 7, 4.0, 1.0),
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


def over(x, scale):
    """x / s, FP64: exact where it is the middle between two values."""
    return x.double().numpy() / oracle.spread(scale.double().numpy(), tuple(x.shape))


@pytest.mark.parametrize("format", ["E2M1", "E4M3", "E5M2", "INT4", "INT8"])
@pytest.mark.parametrize("tile", [(1, -1), (1, 32), (3, -1)], ids=str)
def test_exact_ties_under_fp32_scales_go_to_the_even_code(format, tile):
    """Middles between two codes' values times scales of eight bits, which no step rounds. As x (1 / s) 7 % went to the
    odd code."""
    x = ties(format) if tile[0] == 1 else ties(format).repeat_interleave(3, 0)
    x[:, 32] = x[:, 0]  # the largest, in every tile
    q = Quantizer(FORMATS[format], tile)(x)
    place, table = over(x, q.scale), oracle.TABLES[format]
    assert np.array_equal(q.codes.double().numpy(), oracle.to_grid(place, format))
    below, above = (table[i] for i in oracle.neighbours(np.abs(place), table))
    assert ((np.abs(place) * 2 == below + above) & (below < above)).mean() > 0.8


def test_exact_ties_of_nvfp4_go_to_the_even_code():
    x = ties("E2M1", 16)
    for row in x.split(1):  # one tensor scale each
        q = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4)(row)
        assert np.array_equal(q.codes.double().numpy(), oracle.to_grid(over(row, q.scale), "E2M1"))


def test_exact_ties_of_outlier_carriers_go_to_the_even_code():
    x = ties("E2M1")
    codes, scale = torch.ops.lowprec.quantize_outliers(x, 0)
    assert np.array_equal(codes.double().numpy() * 256, oracle.to_grid(over(x, scale) * 256, "E2M1"))
