"""Averis (arXiv 2603.10444): the mean over the tokens is taken out of X and dY before they are rounded, by any recipe.

    X = 1 mu^T + R,  dY = 1 mu_g^T + R_g
    Y  = Q(R) Q(W)^T   + 1 (mu W^T)
    dX = Q(R_g) Q(W)   + 1 (mu_g W)
    dW = Q(R_g)^T Q(R) + T mu_g mu^T

Q is that of the recipe that it is put on; the bundle's is `nvfp4`. The products of the means are kept in FP32
(`precision.mean_split`), where the published form rounds them to four bits too.
"""

from __future__ import annotations

from dataclasses import replace

from lowprec_train.precision.recipe import LinearRecipe


def recipe(*, of: LinearRecipe) -> LinearRecipe:
    """of: any recipe that rounds something."""
    return replace(of, mean_split=True)
