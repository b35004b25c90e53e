"""Options of a tile's scale beside its rule: the choice among candidates, and a correction factor after rounding."""

from __future__ import annotations

from enum import Enum


class Candidates(Enum):
    """Choice of a tile's scale: that of the rule (NONE), or the candidate with the least error of codes * scale - x:
    sum of squares (MSE), sum of magnitudes (MAE) or largest magnitude (MAX). Of equal errors the larger scale is
    chosen.

    The candidates of LADDER are its rung, the rung below and the two above it. Those of NVFP4 are its block scale and
    3/2 of it, under an outer scale for 256 instead of 448 ("four over six", arXiv 2512.02010); of equals its block
    scale.
    """

    NONE = "none"
    MSE = "mse"
    MAE = "mae"
    MAX = "max"


class Correction(Enum):
    """Correction factor of scales after rounding to nearest, which makes the rounding error orthogonal to x: EDEN's
    factor c = sum x**2 / sum x (codes * scale), arXiv 2601.22813.

    ROW    one FP32 factor for a row, over all of k; for LADDER scales
    GROUP  one factor for 128 elements, multiplied into NVFP4's block scales with stochastic rounding (needs a seed)
    """

    NONE = "none"
    ROW = "row"
    GROUP = "group"
