"""A matrix cut over ranks is rounded as the whole: every format, tile and rule, by rows and by columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowprec_train.numerics.formats import BF16, E2M1, E4M3, STOCHASTIC
from lowprec_train.numerics.pairs import both, pairs
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule, Shared
from tests.groups import Recorded, among
from tests.numerics.data import boundaries, heavy, normal
from tests.numerics.quantized import POWERS, ROUNDING, SCALED, TILES, origin, rules, seed

ROWS, COLUMNS, COUNT = 64, 128, 2


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def cut(whole: Tensor, dim: int, rank: int) -> Tensor:
    """A rank's part of codes or scales; one number stands for all parts."""
    return whole.chunk(COUNT, dim)[rank] if whole.shape[dim] > 1 else whole


def assert_parts_are_cut(how: Quantizer, x: Tensor, dim: int) -> None:
    of = how(x, seed() if how.stochastic else None, origin(3, 16))
    asked = []

    def body(group):
        part = x.chunk(COUNT, dim)[group.rank]
        first = group.rank * part.shape[dim]
        at = origin(3 + first * (dim == 0), 16 + first * (dim == 1))
        return how(part, seed() if how.stochastic else None, at, Shared(dim=dim, group=Recorded(group, asked)))

    for rank, part in enumerate(among(COUNT, body)):
        every = [(part.codes, of.codes), (part.scale, of.scale)]
        for mine, whole in every + [(part.parts[name], of.parts[name]) for name in of.parts]:
            assert torch.equal(bits(mine), bits(cut(whole, dim, rank))), how
    assert (len(asked) > 0) == how.crosses(dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("matrix", [normal, heavy, boundaries], ids=lambda f: f.__name__)
@pytest.mark.parametrize("format", (*SCALED, BF16), ids=str)
def test_parts_are_the_whole_cut(format, matrix, dim):
    x = torch.from_numpy(matrix(ROWS, COLUMNS)).float()
    x[5], x[:, 70:72] = 0, 0
    for tile in TILES:
        for rule in rules(format):
            for stochastic in (False, True):
                assert_parts_are_cut(Quantizer(format, tile, rule, ROUNDING[stochastic]), x, dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_a_part_have_the_scales_of_whole_rows(dim):
    x = torch.from_numpy(heavy(ROWS, COLUMNS)).float()
    x[5], x[:, 70:72] = 0, 0
    for tile in ((1, 16), (1, -1)):
        for stochastic in (False, True):
            how = Quantizer(E2M1, tile, ScaleRule.NVFP4, ROUNDING[stochastic], outer=(1, -1))
            assert_parts_are_cut(how, x, dim)
            assert how.crosses(0) is False and how.crosses(1)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rule", POWERS)
def test_a_span_hangs_from_the_whole_row(rule, dim):
    x = torch.from_numpy(heavy(ROWS, COLUMNS)).float()
    x[:, : COLUMNS // 2] *= 2.0**-20
    x[9, : COLUMNS // 2], x[10] = 0, 0
    for tile in ((1, 32), (1, -1), (16, 16)):
        assert_parts_are_cut(Quantizer(E2M1, tile, rule, exponent_span=14), x, dim)
        assert_parts_are_cut(Quantizer(E2M1, tile, rule, rounding=STOCHASTIC, exponent_span=5), x, dim)


WIDE = (Quantizer(E4M3, scale=ScaleRule.POW2), Quantizer(E2M1, (1, -1)), Quantizer(E2M1, (-1, 8)))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("how", WIDE, ids=str)
def test_what_is_no_number_shows_on_every_rank(how, bad, dim):
    """In the scales of all parts of its tile, and so in every value of them."""
    x = torch.from_numpy(normal(ROWS, COLUMNS)).float()
    x[2, 3] = bad

    def body(group):
        return how(x.chunk(COUNT, dim)[group.rank], shared=Shared(dim=dim, group=group))

    of, parts = how(x), among(COUNT, body)
    for rank, part in enumerate(parts):
        assert torch.equal(part.scale.isfinite(), cut(of.scale, dim, rank).isfinite())
    got, want = torch.cat([part.dequantize() for part in parts], dim), of.dequantize()
    assert torch.equal(got.isfinite(), want.isfinite()) and not want.isfinite().all()


TENSOR, LINE = (Quantizer(E4M3, tile, ScaleRule.POW2) for tile in ((-1, -1), (1, 32)))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("how", [TENSOR, LINE], ids=str)
def test_both_orientations_of_a_part(how, dim):
    """With an amax that was left, and without."""
    x = torch.from_numpy(heavy(ROWS, COLUMNS)).to(torch.bfloat16)
    assert pairs(how, how)

    def body(group):
        part, shared = x.chunk(COUNT, dim)[group.rank], Shared(dim=dim, group=group)
        return [both(part, how, how, amax=left, shared=shared) for left in (None, part.abs().amax(1).float())]

    for rank, results in enumerate(among(COUNT, body)):
        for result in results:
            for mine, whole, at in zip(result, both(x, how, how), (dim, 1 - dim)):
                assert torch.equal(bits(mine.codes), bits(cut(whole.codes, at, rank)))
                assert torch.equal(mine.scale, cut(whole.scale, at, rank))
