"""FP8 with a scale per row: every operand rounded along its own GEMM's reduction, E4M3 throughout.

    Y  = E4M3(X) E4M3(W)^T           a scale per token of X, per output channel of W
    dX = E4M3(dY) E4M3(W^T)^T        per token of dY, per input channel of W
    dW = E4M3(dY^T) E4M3(X^T)^T      per output channel of dY, per input channel of X, over the tokens

Row-wise current scaling as in torchao's `rowwise` recipe: an outlier affects the scale of its row only, and scales are
applied after the sums of a GEMM. No codes can be shared by two GEMMs, so X is saved in BF16. Scales are powers of two.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe


def recipe(*, gradient: str = "E4M3") -> LinearRecipe:
    """gradient: format of dY, "E4M3" or "E5M2"."""
    row = Quantizer(E4M3, tile=(1, -1), scale=ScaleRule.POW2)
    dy = Quantizer(parse_format(gradient), tile=(1, -1), scale=ScaleRule.POW2)
    backward = Gemm(a=dy, b=row, split_accumulation=True)
    return LinearRecipe(fprop=Gemm(a=row, b=row), dgrad=backward, wgrad=backward)
