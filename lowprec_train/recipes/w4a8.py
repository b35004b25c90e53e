"""Four-bit weights, eight-bit activations: MXFP4 W in FP8 GEMMs, forward and backward.

    Y  = E4M3(X) MX(W)^T              X under one scale, W in E2M1 1x32 under powers of two
    dX = E5M2(dY s_W) carriers(W)     fprop's codes of W folded into E4M3; row scales s_W are multiplied into dY
    dW = E5M2(dY)^T E4M3(X)           reuses fprop's codes of X; saves one byte per element

The format that DeepSeek-V4 (arXiv 2606.19348) and Kimi K3 (arXiv 2607.24653) train for and release: four-bit weights,
eight-bit GEMMs. The estimator for W is straight-through. Block exponents of a row lie within 14 binades, so a code
times its block's power of two is an E4M3 number. FP8 GEMMs therefore multiply MXFP4 exactly, and the FSDP all-gather
moves packed codes.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E2M1, E4M3, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput

SPAN = 14  # E4M3 carriers


def recipe(*, gradient: str = "E5M2") -> LinearRecipe:
    """gradient: format of dY, "E5M2" or "E4M3"."""
    x = Quantizer(E4M3, scale=ScaleRule.POW2)
    w = Quantizer(E2M1, tile=(1, 32), scale=ScaleRule.E8M0_CEIL, exponent_span=SPAN)
    dy = Quantizer(parse_format(gradient), scale=ScaleRule.POW2)
    backward = Gemm(a=dy, b=Reuse.FPROP_CODES, split_accumulation=True)
    fprop = Gemm(a=x, b=w, split_accumulation=True)
    return LinearRecipe(fprop=fprop, dgrad=backward, wgrad=backward, saved_input=SavedInput.CODES)
