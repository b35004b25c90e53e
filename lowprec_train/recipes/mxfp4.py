"""MXFP4 backward with stochastic rounding and random Hadamard (arXiv 2502.20586, AISTATS 2025).

    Y  = X W^T in BF16
    dX = 16/9 Q(dY H) Q(W^T H)^T,   dW = 16/9 Q(dY^T H') Q(X^T H')^T

Q rounds 3/4 of a block of 32 stochastically to E2M1 under 2**(floor(log2 amax) - 2): nothing saturates, so E[Q(v)] =
3/4 v and the GEMM is unbiased; the factor 4/3 of each operand is part of its scale. H is a random
Hadamard transform of 64 along the reduction, signs drawn for every GEMM. Block exponents of a row stay within the range
of one FP8 carrier (docs/numerics.md).
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E2M1, NEAREST, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.recipe import Gemm, LinearRecipe

GRADIENT_SPAN = 28  # E5M2 carriers: the operand with the wide range
OTHER_SPAN = 14  # E4M3 carriers


def backward(rotation: int = 64, stochastic: bool = True) -> Gemm:
    """One MXFP4 GEMM; rotation 0: no Hadamard transform. Nearest rounding takes the ceil rule (arXiv 2506.08027)."""
    rule, rounding = (ScaleRule.E8M0_FLOOR, STOCHASTIC) if stochastic else (ScaleRule.E8M0_CEIL, NEAREST)
    a = Quantizer(E2M1, tile=(1, 32), scale=rule, rounding=rounding, exponent_span=GRADIENT_SPAN)
    b = Quantizer(E2M1, tile=(1, 32), scale=rule, rounding=rounding, exponent_span=OTHER_SPAN)
    return Gemm(a=a, b=b, rotation=RandomHadamard(rotation) if rotation else None, split_accumulation=True)


def recipe(*, rotation: int = 64, stochastic: bool = True) -> LinearRecipe:
    """rotation: Hadamard block, 0 for none. stochastic: False rounds to nearest."""
    gemm = backward(rotation, stochastic)
    return LinearRecipe(dgrad=gemm, wgrad=gemm)
