"""MXFP8 pretraining (arXiv 2506.08027): E4M3 everywhere, blocks of 32 along every reduction, scales rounded up.

    Y  = Q(X) Q(W)^T           both in 1x32 along the input channels
    dX = Q(dY) Q(W^T)^T        both in 1x32 along the output channels; W is rounded along each of its dimensions
    dW = Q(dY^T) Q(X^T)^T      both in 1x32 along the tokens; codes of X^T are made in the forward pass and saved

A block's scale is 2**ceil(log2(amax / 448)): nothing saturates. The floor rule of OCP MX v1.0 clips, which may
diverge. Gradients are E4M3 too: within a block of 32 they do not need the range of E5M2.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E4M3, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput


def recipe(*, gradient: str = "E4M3") -> LinearRecipe:
    """gradient: format of dY, "E4M3" or "E5M2"."""
    line = Quantizer(E4M3, tile=(1, 32), scale=ScaleRule.E8M0_CEIL)
    dy = Quantizer(parse_format(gradient), tile=(1, 32), scale=ScaleRule.E8M0_CEIL)
    backward = Gemm(a=dy, b=line, split_accumulation=True)
    fprop = Gemm(a=line, b=line, split_accumulation=True)
    return LinearRecipe(fprop=fprop, dgrad=backward, wgrad=backward, saved_input=SavedInput.OPERAND)
