"""MXFP4 backward with an FP8 forward (arXiv 2502.20586, section 4.2).

Y as in fp8; dX and dW as in mxfp4. wgrad requantises the E4M3 codes of X that fprop saved.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput
from lowprec_train.recipes.mxfp4 import backward


def recipe(*, rotation: int = 64, stochastic: bool = True) -> LinearRecipe:
    """rotation: Hadamard block of the backward GEMMs, 0 for none. stochastic: False rounds to nearest."""
    operand = Quantizer(E4M3, scale=ScaleRule.POW2)
    gemm = backward(rotation, stochastic)
    return LinearRecipe(fprop=Gemm(a=operand, b=operand), dgrad=gemm, wgrad=gemm, saved_input=SavedInput.CODES)
