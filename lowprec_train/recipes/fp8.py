"""FP8 with current scaling: one power-of-two scale per tensor, from the amax of that tensor.

    Y  = E4M3(X) E4M3(W)^T       fast accumulation
    dX = E5M2(dY) E4M3(W)        split accumulation; reuses fprop's codes of W and X
    dW = E5M2(dY)^T E4M3(X)      split accumulation; saves one byte per element of X

Formats as in FP8-LM (arXiv 2310.18313) and TransformerEngine's hybrid; no amax history. With power-of-two scales,
results do not depend on the data-parallel layout.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput


def recipe(*, gradient: str = "E5M2") -> LinearRecipe:
    """gradient: format of dY, "E5M2" or "E4M3"."""
    operand = Quantizer(E4M3, scale=ScaleRule.POW2)
    backward = Gemm(
        a=Quantizer(parse_format(gradient), scale=ScaleRule.POW2), b=Reuse.FPROP_CODES, split_accumulation=True
    )
    return LinearRecipe(fprop=Gemm(a=operand, b=operand), dgrad=backward, wgrad=backward, saved_input=SavedInput.CODES)
