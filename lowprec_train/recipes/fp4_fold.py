"""FOLD3 in all three GEMMs: blocks and error of NVFP4, computed exactly on FP8 tensor cores.

    Y  = Q(X) Q(W)^T
    dX = E(dY H) E(W^T H)^T,   dW = E(dY^T H') E(X^T H')^T

Q rounds blocks of 1x16 to the nearest E2M1 code. Block scales have the form {1, 1.25, 1.5} 2^e; the one with the least
squared error of four candidates is used. Codes times block scales are E4M3 numbers, so the blocks of a row share one
scale in the GEMM (docs/numerics.md). E is Q times EDEN's factor of each row, sum y^2 / sum y Q(y). It is unbiased for
the signs of the random Hadamard transform H, drawn for every GEMM, without stochastic rounding. (arXiv 2601.22813 has a
factor per 128 elements, in stochastically rounded E4M3 scales.) wgrad rounds the codes of X that fprop saved; dgrad
rounds W again.
"""

from __future__ import annotations

from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.ladder import SPAN
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput


def operand(correction: Correction = Correction.NONE) -> Quantizer:
    """FOLD3, with or without a factor per row."""
    return Quantizer(
        E2M1,
        tile=(1, 16),
        scale=ScaleRule.LADDER,
        exponent_span=SPAN,
        candidates=Candidates.MSE,
        correction=correction,
    )


def backward(rotation: int = 128) -> Gemm:
    """One corrected FOLD3 GEMM; rotation 0: no Hadamard transform, without which the factor leaves a bias."""
    corrected = operand(Correction.ROW)
    rotated = RandomHadamard(rotation, half=True) if rotation else None
    return Gemm(a=corrected, b=corrected, rotation=rotated, split_accumulation=True)


def recipe(*, rotation: int = 128, packed: bool = False) -> LinearRecipe:
    """rotation: Hadamard block of the backward GEMMs, 0 for none. packed: X is saved in 4.5 bits an element, where
    carriers take 8.
    """
    line, gemm = operand(), backward(rotation)
    fprop = Gemm(a=line, b=line, split_accumulation=True)
    saved = SavedInput.PACKED if packed else SavedInput.CODES
    return LinearRecipe(fprop=fprop, dgrad=gemm, wgrad=gemm, saved_input=saved)
