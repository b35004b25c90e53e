"""Many matrices that are quantised together have the codes of each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowprec_train.group import SingleRank
from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, STOCHASTIC
from lowprec_train.numerics.lists import amax_all, quantize_lists, quantizes_lists
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule, Shared

CPU = torch.device("cpu")
POW2 = Quantizer(E4M3, scale=ScaleRule.POW2)
WHOLE = (POW2, Quantizer(E5M2, scale=ScaleRule.FP32), Quantizer(E2M1, scale=ScaleRule.FP32))


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((6, 32), (3, 7), (64, 200), (1, 1), (6, 32), (5, 40))
    return [(torch.randn(*shape, generator=generator) * 2.0**k).bfloat16() for k, shape in enumerate(shapes)]


def test_codes_and_scales() -> None:
    """Two quantisers of three take turns; maxima are those of wholes, of which the matrices are parts."""
    xs = matrices()
    maxima = amax_all(xs)
    assert torch.equal(maxima, torch.stack([x.float().abs().amax() for x in xs]))
    maxima = maxima * torch.tensor([1.0, 3.0, 1.0, 1.0, 1.5, 1.0])
    quantizers = [WHOLE[place % 3] for place in range(len(xs))]
    made = quantize_lists(list(zip(quantizers, xs, maxima.unbind(), strict=True)))
    for quantizer, x, amax, got in zip(quantizers, xs, maxima, made, strict=True):
        wanted = quantizer(x, shared=Shared(dim=0, group=SingleRank(), amax=amax.view(1, 1)))
        assert torch.equal(got.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(got.scale, wanted.scale) and got.scale.shape == (1, 1)


def test_scales_are_aligned_to_16_bytes() -> None:
    """As cuBLAS wants scales of a matrix."""
    xs = matrices()
    made = quantize_lists([(POW2, x, amax) for x, amax in zip(xs, amax_all(xs).unbind(), strict=True)])
    assert not any(each.scale.data_ptr() % 16 for each in made)


@pytest.mark.parametrize(
    "quantizer",
    [
        replace(POW2, tile=(1, -1)),
        replace(POW2, rounding=STOCHASTIC),
        Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL, exponent_span=14),
        Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4),
    ],
    ids=str,
)
def test_what_is_quantised_by_itself(quantizer) -> None:
    assert quantizes_lists(POW2, CPU) and not quantizes_lists(quantizer, CPU)
