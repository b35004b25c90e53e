"""BF16: the baseline. All three GEMMs in BF16 with FP32 accumulation."""

from __future__ import annotations

from lowprec_train.precision.recipe import LinearRecipe


def recipe() -> LinearRecipe:
    """The identity."""
    return LinearRecipe()
