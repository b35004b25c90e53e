"""FP4 training with a differentiable estimator and outlier compensation (arXiv 2501.17116, ICML 2025).

    Y  = E2M1(clamp(X)) E2M1(W)^T, plus X's outliers    X scaled per token, W per output channel, scale = amax / 6
    dX = E5M2(dY * s_W) codes(W)                        s_W varies along k here: multiplied into dY before rounding
    dW = E5M2(dY^T * s_X) codes(X) * f'(W / s_W)        DGE, k = 5, slope capped at 3

Backward GEMMs are FP8, dY scaled along each GEMM's rows. Outliers are the values of a token outside its quantiles [1 -
alpha, alpha]. This follows the paper if the released code departs from it: ties to even,
FP32 scales, scales of W per output channel.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import E2M1, parse_format
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.estimators import DifferentiableEstimator, Estimator, StraightThrough
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput


def recipe(
    *, alpha: float = 0.99, outliers: str = "carrier", gradient: str = "E5M2", dge_k: float = 5.0, dge_cap: float = 3.0
) -> LinearRecipe:
    """alpha: outlier quantile, 1 clamps nothing. outliers: "carrier" or "residual". dge_k: 1 is straight-through."""
    row = Quantizer(E2M1, tile=(1, -1))
    clamp = OutlierClamp(alpha, outliers) if alpha < 1 else None
    backward = Gemm(a=Quantizer(parse_format(gradient), tile=(1, -1)), b=Reuse.FPROP_CODES, split_accumulation=True)
    estimator: Estimator = DifferentiableEstimator(dge_k, dge_cap) if dge_k != 1 else StraightThrough()
    fprop = Gemm(a=row, b=row, outliers=clamp, split_accumulation=True)
    return LinearRecipe(fprop=fprop, dgrad=backward, wgrad=backward, estimator=estimator, saved_input=SavedInput.CODES)
