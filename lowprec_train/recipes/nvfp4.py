"""NVFP4 pretraining (arXiv 2509.25149): all three GEMMs in E2M1 under two levels of scales.

    Y  = Q(X) Q2(W)^T                 X in 1x16, nearest; W in 16x16, nearest
    dX = SR(dY) Q2(W)                 dY in 1x16, stochastic; a square block serves W and W^T alike
    dW = SR(dY^T H) Q(X^T H)^T        a random Hadamard transform of 16 along the tokens, 1x16

A block's scale is E4M3 under one FP32 scale of the tensor. Stochastic rounding uses 17/16 of head-room; without it, a
block scale that was rounded down would clip its maximum (IST-DASLab's Quartet II). Signs are drawn for every GEMM; the
paper uses one vector for all of training. X^T H is rounded in the forward pass and saved, two codes a byte. Blocks of
16x16 in W save a second rounding, but increase the loss (Quartet II's published runs, arXiv 2601.22813). As in the
paper, the bundle's policy leaves the last blocks in BF16.
"""

from __future__ import annotations

from dataclasses import replace

from lowprec_train.numerics.corrections import Candidates
from lowprec_train.numerics.formats import E2M1, NEAREST, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput

SELECTIONS = {"none": Candidates.NONE, "4over6": Candidates.MSE}


def recipe(
    *,
    rotation: int = 16,
    stochastic: bool = True,
    square: bool = True,
    row_scaled: bool = False,
    select: str = "none",
) -> LinearRecipe:
    """rotation: Hadamard block of wgrad, 0 for none. stochastic: False rounds dY to nearest. square: False rounds W in
    1x16 along each GEMM's reduction. row_scaled: True gives each row of fprop's X an FP32 scale of its own.
    select: "4over6" lets each block of fprop's operands reach 6 or 4, by the squared error (arXiv 2512.02010).
    """
    if select not in SELECTIONS:
        raise ValueError(f"select is one of {', '.join(SELECTIONS)}, not {select!r}")
    line = Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4)
    forward = replace(line, candidates=SELECTIONS[select])
    x = replace(forward, outer=(1, -1)) if row_scaled else forward
    w = replace(forward, tile=(16, 16)) if square else forward
    dy = Quantizer(E2M1, tile=(1, 16), scale=ScaleRule.NVFP4, rounding=STOCHASTIC if stochastic else NEAREST)
    return LinearRecipe(
        fprop=Gemm(a=x, b=w),
        dgrad=Gemm(a=dy, b=Reuse.FPROP_CODES if square else line),
        wgrad=Gemm(a=dy, b=line, rotation=RandomHadamard(rotation) if rotation else None),
        saved_input=SavedInput.OPERAND,
    )
