"""Averis (arXiv 2603.10444): subtracts the mean over the tokens from X and dY before another recipe rounds them.

    X = 1 mu^T + R,  dY = 1 mu_g^T + R_g
    Y  = Q(R) Q(W)^T   + 1 (mu W^T)
    dX = Q(R_g) Q(W)   + 1 (mu_g W)
    dW = Q(R_g)^T Q(R) + T mu_g mu^T

Q is the quantiser of the base recipe, by default `nvfp4`. The products of the means stay in FP32
(`precision.mean_split`); the paper rounds the means to four bits too.
"""

from __future__ import annotations

from dataclasses import replace

from lowprec_train.precision.recipe import LinearRecipe


def recipe(*, of: LinearRecipe) -> LinearRecipe:
    """of: any recipe that rounds something."""
    return replace(of, mean_split=True)
