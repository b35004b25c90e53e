"""SwitchBack (arXiv 2304.13013, section 2): int8 where the reduction is short, 16 bits where it is long.

    Y  = int8(X) int8(W)^T      a scale per token of X, one for W, amax / 127; exact integer sums
    dX = int8(dY) int8(W)       a scale per token of dY; reuses fprop's codes of W
    dW = dY^T X in BF16         its reduction runs over all tokens, and the noise of int8 grows with the reduction

dW is bit-equal to that of the BF16 recipe for the same dY and X. The paper trains with StableAdamW instead of
gradient clipping; so does the recipe's bundle.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import INT8
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse


def recipe() -> LinearRecipe:
    """The paper's SwitchBack; no options."""
    row, tensor = Quantizer(INT8, tile=(1, -1)), Quantizer(INT8)
    return LinearRecipe(fprop=Gemm(a=row, b=tensor), dgrad=Gemm(a=row, b=Reuse.FPROP_CODES))
