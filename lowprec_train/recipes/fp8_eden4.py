"""FP8 forward and four-bit backward without stochastic rounding: Y of `fp8`, dX and dW of `fp4_fold`.

    Y  = E4M3(X) E4M3(W)^T
    dX = E(dY H) E(W^T H)^T,   dW = E(dY^T H') E(X^T H')^T

In published runs almost all of the loss from four bits comes from the forward pass (arXiv 2601.22813). wgrad rounds
the E4M3 codes of X that fprop saved. With saved_input=OPERAND it rounds X in the forward pass, and saves 4.5 bits an
element instead of 8.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput
from lowprec_train.recipes.fp4_fold import backward


def recipe(*, rotation: int = 128) -> LinearRecipe:
    """rotation: Hadamard block of the backward GEMMs, 0 for none."""
    operand, gemm = Quantizer(E4M3, scale=ScaleRule.POW2), backward(rotation)
    return LinearRecipe(fprop=Gemm(a=operand, b=operand), dgrad=gemm, wgrad=gemm, saved_input=SavedInput.CODES)
