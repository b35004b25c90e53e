"""FP8 with current scaling: every operand rounded with one power-of-two scale for the tensor, taken from the tensor
itself.

    Y  = E4M3(X) E4M3(W)^T       fast accumulation
    dX = E5M2(dY) E4M3(W)        split accumulation; codes of W and X are fprop's own
    dW = E5M2(dY)^T E4M3(X)      split accumulation; one byte of X kept

Formats as in FP8-LM (arXiv 2310.18313) and TransformerEngine's hybrid; no amax history. Power-of-two scales make the
data-parallel layouts agree.
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
