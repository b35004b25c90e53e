"""A sharded weight after its all-gather: values or codes to compute with, and a leaf that takes its gradient.

    x, values or codes, leaf -> y        dY -> dX, dW into the leaf, in the leaf's dtype

What arrives is in a narrow dtype, and autograd hands a parameter a gradient of the parameter's own dtype: to an FP8
parameter an FP8 one, without a word. So what arrives enters the graph without a gradient, and the leaf, which has the
weight's shape, the master's dtype and no memory, takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe, Reuse


@dataclass(frozen=True, kw_only=True)
class AllGatheredWeight:
    """A weight [n, k] after its all-gather.

    leaf: takes the gradient. coded: whether `tensors` are codes, then their scale or its two levels (as a
    `precision.saved.SavedOperand` has them); otherwise they are the values, themselves a leaf that takes the gradient
    of a plain product.
    """

    leaf: Tensor
    coded: bool
    tensors: tuple[Tensor, ...]


def weight_codes(recipe: LinearRecipe) -> Quantizer | None:
    """What rounds the weight, where each GEMM takes it as these codes and in no other way; None for other recipes.

    That is so where fprop's codes are made by rounding to nearest to a byte or less, are multiplied in fprop, and are
    reused in dgrad, as they are or rounded again. The estimator's slope asks for the weight too: whoever has it
    multiplies by the slope, which is the same for all contributions to a sum. Means that are split off are multiplied
    by the weight itself.
    """
    fprop, quantizer = recipe.fprop, recipe.fprop.b
    again = recipe.dgrad.b is Reuse.FPROP_CODES or recipe.weight_from_codes
    if not isinstance(quantizer, Quantizer) or not again or fprop.codes_only:
        return None
    if quantizer.scale is ScaleRule.LADDER or recipe.mean_split:
        return None
    whole = fprop.outliers is None or fprop.outliers.variant == "carrier"  # a residual is multiplied by the weight
    return quantizer if whole and not quantizer.stochastic and quantizer.format.carrier.itemsize == 1 else None
