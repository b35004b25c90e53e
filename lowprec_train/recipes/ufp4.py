"""UFP4 (arXiv 2606.20381): uniform four-bit codes, and a random Hadamard transform on every GEMM.

    Y  = Q(X H) Q(W H)^T
    dX = SR(dY H) Q(W^T H)^T
    dW = SR(dY^T H) Q(X^T H)^T          each GEMM has its own signs; X^T H is made in the forward pass

Q rounds blocks of 16 along the reduction to -7 .. 7 under one FP32 scale a block, max / 7; H is a transform of 16, the
size of the block. There is no second level of scales, and no square block of W. Only dY is rounded stochastically. The
grid of E2M1 is non-uniform, which shrinks a rotated operand on average; a uniform grid does not.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import INT4, NEAREST, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput


def recipe(*, rotation: int = 16, stochastic: bool = True) -> LinearRecipe:
    """rotation: Hadamard block of all GEMMs, 0 for none. stochastic: False rounds dY to nearest."""
    line = Quantizer(INT4, tile=(1, 16))
    dy = Quantizer(INT4, tile=(1, 16), rounding=STOCHASTIC if stochastic else NEAREST)
    hadamard = RandomHadamard(rotation) if rotation else None
    backward = Gemm(a=dy, b=line, rotation=hadamard)
    fprop = Gemm(a=line, b=line, rotation=hadamard)
    return LinearRecipe(fprop=fprop, dgrad=backward, wgrad=backward, saved_input=SavedInput.OPERAND)
