"""A sharded weight after its all-gather: values or codes to compute with, and a leaf that takes its gradient.

    x, values or codes, leaf -> y        dY -> dX, dW into the leaf, in the leaf's dtype

Autograd casts a gradient to the dtype of its tensor, silently: to FP8 for an FP8 tensor. The gathered tensors therefore
do not require gradients. The leaf receives the gradient; it has its shape and dtype, and no storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import LinearRecipe


@dataclass(frozen=True, kw_only=True)
class AllGatheredWeight:
    """A weight [n, k] after its all-gather.

    leaf: receives the gradient. coded: True if `tensors` are codes and their scale or its two levels, in the order of
    `precision.saved.SavedOperand`. Otherwise they are the values, a leaf that receives the gradient of a BF16 product.
    """

    leaf: Tensor
    coded: bool
    tensors: tuple[Tensor, ...]


def weight_codes(recipe: LinearRecipe) -> Quantizer | None:
    """The weight's quantiser if all GEMMs can work from its codes alone; otherwise None.

    This requires that fprop uses the codes, that dgrad reuses or requantises them, rounding to nearest, and at most one
    byte per code. An estimator is allowed: the shard's owner applies the slope after the reduction. A mean split is
    not, because means are multiplied by the unquantised weight.
    """
    fprop, quantizer = recipe.fprop, recipe.fprop.b
    if not isinstance(quantizer, Quantizer) or not recipe.needs_weight_codes or fprop.codes_only:
        return None
    if quantizer.scale is ScaleRule.LADDER or recipe.mean_split:
        return None
    whole = fprop.outliers is None or fprop.outliers.variant == "carrier"  # a residual is multiplied by the weight
    return quantizer if whole and not quantizer.stochastic and quantizer.format.carrier.itemsize == 1 else None
