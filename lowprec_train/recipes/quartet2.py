"""Quartet II (arXiv 2601.22813): NVFP4 in all three GEMMs, with MS-EDEN in the backward ones.

    Y  = Q(X) Q(W)^T                        blocks of 1x16 to nearest that reach 6 or 4 (arXiv 2512.02010)
    dX = E(dY H) E(codes(W)^T H)^T,   dW = E(dY^T H') E(codes(X)^T H')^T

E rounds blocks of 1x16 to nearest after a random Hadamard transform of 128. It multiplies EDEN's factor of each 128
elements, sum y^2 / sum y E(y), into their E4M3 scales, which are rounded stochastically (`ops.eden`). E is unbiased,
except for rows with one or two large values. Its squared error is .0098; that of stochastic rounding is .0235. The
backward pass rounds fprop's codes of X and W, so only these are saved, two a byte.
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
