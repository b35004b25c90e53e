"""NVFP4 blocks with EDEN's factor of 128 elements in their scales: bit for bit the oracle's, and what it promises."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E2M1, E4M3, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule, Shared
from lowprec_train.ops import eden as ops
from tests.groups import among
from tests.numerics.quantized import SEED, codes, expected_codes, origin, seed
from tests.oracle import F32, F64, bf16, rotate_float32, spread
from tests.oracle_cases import CASES
from tests.oracle_eden import eden

EDEN = Quantizer(E2M1, (1, 16), ScaleRule.NVFP4, correction=Correction.GROUP)
M, K = 11, 384


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_every_number(case):
    for dtype, place in itertools.product((torch.float32, torch.bfloat16), ((0, 0), (5, 256))):
        x = case(M, K, (1, 16), "E2M1", np.random.default_rng(7))
        x = bf16(x).astype(F32) if dtype is torch.bfloat16 else x
        got = EDEN(torch.from_numpy(x).to(dtype), seed(), origin(*place))
        with np.errstate(all="ignore"):
            want = eden(x, SEED, place)
        np.testing.assert_array_equal(codes(got), expected_codes(want.rounded, E2M1))
        np.testing.assert_array_equal(got.scale.numpy(), want.rounded.scale)
        np.testing.assert_array_equal(got.parts["block"].double().numpy(), want.stored)
        np.testing.assert_array_equal(got.parts["tensor"].numpy(), want.tensor)


@pytest.mark.parametrize("rotation", [0, 16, 128])
def test_the_op_rotates(rotation):
    """As `hadamard` before it, and as butterflies in float32; its draws are those of the scales alone."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = EDEN.of_rotated(x, seed(9), rotation, seed())
    if rotation:
        step = EDEN(torch.ops.lowprec.hadamard(x, seed(9), rotation), seed())
        assert torch.equal(got.scale, step.scale) and torch.equal(got.codes.float(), step.codes.float())
    y = rotate_float32(x.double().numpy(), 9, rotation) if rotation else x.float().numpy()
    np.testing.assert_array_equal(codes(got), expected_codes(eden(y, SEED).rounded, E2M1))


def test_the_product_with_itself_is_exact_before_scales_are_rounded():
    """<y, c q b t> = |y|^2 in every group of 128, though its blocks differ by five binades."""
    x = np.random.default_rng(1).standard_normal((64, 512)).astype(F32)
    x *= 2.0 ** np.random.default_rng(2).integers(0, 6, (64, 32)).repeat(16, axis=1)
    made = eden(x, SEED)
    rounded = made.rounded.values * spread(made.block * made.tensor.astype(F64), x.shape)
    rounded *= spread(made.factor.astype(F64), x.shape)
    own, product = ((x.astype(F64) * each).reshape(64, -1, 128).sum(axis=2) for each in (x, rounded))
    np.testing.assert_allclose(product, own, rtol=1e-6)
    assert 1.005 < made.factor.mean() < 1.015


def test_scales_are_the_neighbours_of_what_they_should_be():
    """Of c b, up with the probability of the place between them: the mean over 4,000 draws is within its error."""
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(4)).expand(4000, -1)
    got = EDEN(x, seed()).parts["block"].double().numpy()
    want = eden(x[:1].numpy(), SEED)
    exact = want.block.astype(F64) * spread(want.factor.astype(F64), want.block.shape)
    for j in range(8):
        found = np.unique(got[:, j])
        assert len(found) == 2 and found[0] <= exact[0, j] <= found[1]
        error = abs(got[:, j].mean() - exact[0, j]) / (got[:, j].std() / 4000**0.5)
        assert error < 4, (j, error)


def test_what_it_leaves_of_normal_numbers():
    """.0098 (arXiv 2601.22813's), and a slope of 1 where NVFP4 to nearest shrinks by .991."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(5))
    y = EDEN(x, seed()).dequantize()
    size = x.double().square().sum()
    assert 0.0096 < ((y - x).double().square().sum() / size).item() < 0.0099
    assert abs(((y.double() * x.double()).sum() / size).item() - 1) < 2e-4


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_the_whole_cut(dim):
    """Where ranks hold rows, and where they hold columns in multiples of 128."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 64)[:, None]
    whole = EDEN.of_rotated(x, seed(1), 128, seed())
    shape = (32, 0) if dim == 0 else (0, 256)

    def part(group):
        of = Shared(dim=dim, group=group)
        place = origin(*(group.rank * n for n in shape))
        return EDEN.of_rotated(x.chunk(2, dim)[group.rank].contiguous(), seed(1), 128, seed(), place, of)

    for rank, each in enumerate(among(2, part)):
        assert torch.equal(each.codes.view(torch.uint8), whole.codes.view(torch.uint8).chunk(2, dim)[rank])
        assert torch.equal(each.scale, whole.scale.chunk(2, dim)[rank])
    assert EDEN.crosses(0) and EDEN.crosses(1)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_visible(value):
    """The scale of the tensor is lost with it."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    x[1, 20] = value
    assert EDEN(x, seed()).dequantize().isnan().all()


def test_nothing_stays_nothing():
    x = torch.zeros(2, 256)
    got = EDEN(x, seed())
    assert (got.codes.float() == 0).all() and (got.scale == 1).all() and got.dequantize().isfinite().all()
    x[1, 3] = 1e-3
    assert (EDEN(x, seed()).dequantize()[0] == 0).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="a seed is required"):
        EDEN(torch.zeros(2, 128))
    with pytest.raises(ValueError, match="1x128 tile does not divide a 2x192"):
        EDEN(torch.zeros(2, 192), seed())
    for change in ({"tile": (1, 32)}, {"outer": (1, -1)}, {"scale": ScaleRule.FP32}, {"tile": (16, 16)}):
        with pytest.raises(ValueError, match="GROUP belongs to NVFP4"):
            replace(EDEN, **change)
    for change in ({"rounding": STOCHASTIC}, {"headroom": 0.5}, {"candidates": Candidates.MSE}):
        with pytest.raises(ValueError, match="a range of its own"):
            replace(EDEN, **change)
    with pytest.raises(ValueError, match="E4M3"):
        replace(EDEN, format=E4M3)


def test_constants_are_those_of_the_paper():
    assert (ops.BLOCK, ops.GROUP, ops.LARGEST) == (16, 128, 255.99) and round(1 / ops.SHARE, 4) == 6.0721
