"""FP8 as NVIDIA's TransformerEngine computes it: its `te.Linear` in place of this project's GEMMs.

    Y = E4M3(X) E4M3(W)^T,   dX = E5M2(dY) E4M3(W),   dW = E5M2(dY)^T E4M3(X)        scales by `scaling`

Formats are those of arXiv 2209.05433; delayed scaling uses the amax of earlier steps. Initial weights, data and
optimizer are those of the other recipes, so a comparison isolates the library.
"""

from __future__ import annotations

from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.transformer_engine import TransformerEngine


def recipe(
    *,
    scaling: str = "delayed",
    gradient: str | None = None,
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    margin: int = 0,
) -> LinearRecipe:
    """As `TransformerEngine` takes them: scaling is delayed, current, block, mxfp8 or nvfp4; gradient E5M2 or E4M3."""
    backend = TransformerEngine(
        scaling=scaling,
        gradient=gradient,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        margin=margin,
    )
    return LinearRecipe(backend=backend)
