"""Quartet II (arXiv 2601.22813): NVFP4 in all three GEMMs, the backward ones almost without loss by MS-EDEN.

    Y  = Q(X) Q(W)^T                        blocks of 1x16 to nearest that reach 6 or 4 (arXiv 2512.02010)
    dX = E(dY H) E(codes(W)^T H)^T,   dW = E(dY^T H') E(codes(X)^T H')^T

E rounds blocks of 1x16 to nearest behind a random Hadamard transform of 128, and multiplies EDEN's factor of each 128
elements, sum y^2 / sum y E(y), into their E4M3 scales, which are rounded stochastically (`ops.eden`): unbiased but
for rows of one or two large values, with .0098 of squared error where stochastic rounding of elements leaves .0235.
What the backward pass rounds of X and W is what fprop multiplied, so that two codes a byte are all that is saved.
"""

from __future__ import annotations

from dataclasses import replace

from lowprec_train.numerics.corrections import Correction
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput
from lowprec_train.recipes.nvfp4 import SELECTIONS


def recipe(*, rotation: int = 128, select: str = "4over6") -> LinearRecipe:
    """rotation: Hadamard block of the backward GEMMs, 0 for none, without which the factors leave a bias. select:
    "none" gives each block of fprop's operands the scale that reaches 6.
    """
    if select not in SELECTIONS:
        raise ValueError(f"select is one of {', '.join(SELECTIONS)}, not {select!r}")
    line = Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4)
    forward, eden = replace(line, candidates=SELECTIONS[select]), replace(line, correction=Correction.GROUP)
    backward = Gemm(a=eden, b=eden, rotation=RandomHadamard(rotation) if rotation else None)
    return LinearRecipe(
        fprop=Gemm(a=forward, b=forward),
        dgrad=backward,
        wgrad=backward,
        saved_input=SavedInput.CODES,
        weight_from_codes=True,
    )
