"""FP4 feed-forward GEMMs among FP8 ones (arXiv 2502.11458): the format depends on the module and on the step.

    feed-forward   Y  = E2M1(X) E2M1(W)^T in blocks of 1x128 along the reduction
                   dX = E5M2(dY) E4M3(W),  dW = E5M2(dY)^T E4M3(X)        a scale per tensor
    attention      fp8 in all three GEMMs: four bits flatten the attention scores
    at the end     BF16 (the paper's target-precision schedule): the precision bundle's `schedule`

Gradients around 0.02 would underflow E2M1, so the backward pass is FP8. It rounds X and W again from BF16. The paper
scales blocks by their maximum in high precision, and does not give the share of steps in the final stage. Here block
scales are powers of two (ceil rule, arXiv 2506.08027), which FP8 tensor cores apply exactly, and the last tenth of the
steps is BF16.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E2M1, E4M3, parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.recipe import Gemm, LinearRecipe, SavedInput

ACTIVATION_SPAN = 28  # E5M2 carriers
WEIGHT_SPAN = 14  # E4M3 carriers


def feed_forward(*, block: int = 128, gradient: str = "E5M2") -> LinearRecipe:
    """block: length of a block along fprop's reduction. gradient: format of dY."""
    rule = ScaleRule.E8M0_CEIL
    x = Quantizer(E2M1, tile=(1, block), scale=rule, exponent_span=ACTIVATION_SPAN)
    w = Quantizer(E2M1, tile=(1, block), scale=rule, exponent_span=WEIGHT_SPAN)
    dy = Quantizer(parse_format(gradient), scale=ScaleRule.POW2)
    backward = Gemm(a=dy, b=Quantizer(E4M3, scale=ScaleRule.POW2), split_accumulation=True)
    return LinearRecipe(
        fprop=Gemm(a=x, b=w, split_accumulation=True), dgrad=backward, wgrad=backward, saved_input=SavedInput.OPERAND
    )
