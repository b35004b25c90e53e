"""NVFP4 behind a rotation by one op: the codes of `hadamard` and a rounding, and their values in BF16, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowprec_train.numerics import rotated
from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E2M1, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import eden, reference

LINE = Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4)
WAYS = {
    "nearest": LINE,
    "stochastic": replace(LINE, rounding=STOCHASTIC),
    "group": replace(LINE, correction=Correction.GROUP),
}
SEED, SIGNS = torch.tensor(7), torch.tensor(3)
x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
x[1, :16], x[2, 32:48], x[3, 5] = 0.0, 1e-30, 3e4


@pytest.mark.parametrize("rotation", [0, 16, 128])
@pytest.mark.parametrize("way", WAYS)
def test_codes_and_their_values(way, rotation):
    how, origin = WAYS[way], torch.tensor([4, 128])
    seed, signs = (None, None) if way == "nearest" else (SEED, None), SIGNS if rotation else None
    arguments = (signs, rotation, seed[0], origin, None)
    y = torch.ops.lowprec.hadamard(x, signs, rotation) if rotation else x
    step, codes = how(y, seed[0], origin), rotated.of_rotated(how, x, *arguments)
    assert torch.equal(codes.codes.float(), step.codes.float()) and torch.equal(codes.scale, step.scale)
    values = rotated.values(how, x, *arguments)
    assert values.codes.dtype is torch.bfloat16 and torch.equal(values.scale, step.parts["tensor"])
    blocks = step.parts["block"].double().repeat_interleave(16, dim=1)
    assert torch.equal(values.codes.double(), step.codes.double() * blocks)


def test_the_reference_leaves_them_too():
    """And NaN where a block is lost."""
    bad = x.clone()
    bad[4, 100] = torch.inf
    found, outer = torch.ops.lowprec.round_nvfp4(bad, 1.0, "nearest", None, None, None, 0)
    want, whole = reference.round_nvfp4(bad, 1.0, "nearest", None, None, None, 0)
    assert torch.equal(outer, whole) and torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(), want.nan_to_num())
    top = torch.ops.lowprec.rotated_amax(x, SIGNS, 128)
    for a, b in zip(
        torch.ops.lowprec.round_eden(x, top, SIGNS, 128, SEED, None),
        eden.round_eden(x, top, SIGNS, 128, SEED, None),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_which_quantisers_are_served():
    assert rotated.makes_values(LINE, None) and not rotated.makes_values(LINE, 0)
    assert all(rotated.makes_values(WAYS["group"], cut) for cut in (None, 0, 1))
    square, rows = replace(LINE, tile=(16, 16)), replace(LINE, outer=(1, -1))
    assert rotated.rotates(square, None) and not rotated.makes_values(square, None)
    assert not rotated.rotates(rows, None) and not rotated.rotates(replace(LINE, candidates=Candidates.MSE), None)
