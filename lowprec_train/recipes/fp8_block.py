"""FP8 with block scales: 1x128 along the reduction for activations and gradients, 128x128 for weights.

    Y  = Q(X) Q(W)^T           X in 1x128 along the input channels, W in 128x128
    dX = Q(dY) Q(W)            dY in 1x128 along the output channels; a square block serves W and W^T alike
    dW = Q(dY^T) Q(X^T)^T      both in 1x128 along the tokens; codes of X^T are made in the forward pass and saved

The granularity of DeepSeek-V3 (arXiv 2412.19437, section 3.3), E4M3 throughout. Scales are powers of two, as
TransformerEngine's Float8BlockScaling takes them on Hopper: code times scale is then exact in BF16 on any hardware.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput


def recipe(*, block: int = 128) -> LinearRecipe:
    """block: length of a block along the reduction, and side of a weight's square."""
    line = Quantizer(E4M3, tile=(1, block), scale=ScaleRule.POW2)
    square = Quantizer(E4M3, tile=(block, block), scale=ScaleRule.POW2)
    return LinearRecipe(
        fprop=Gemm(a=line, b=square, split_accumulation=True),
        dgrad=Gemm(a=line, b=Reuse.FPROP_CODES, split_accumulation=True),
        wgrad=Gemm(a=line, b=line, split_accumulation=True),
        saved_input=SavedInput.OPERAND,
    )
