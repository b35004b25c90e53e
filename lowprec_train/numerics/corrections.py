"""What a tile's scale has beside its rule: which of several it takes, and what is multiplied into it after rounding."""

from __future__ import annotations

from enum import Enum


class Candidates(Enum):
    """Which scale a tile takes: the rule's own (NONE), or of the rule's candidates the one of least error, the larger
    one of equals: the sum of squares (MSE), of magnitudes (MAE), or the largest magnitude (MAX) of codes * scale - x.

    LADDER's candidates are the rung below its own, its own and the rung above. NVFP4's are its own block scale and 3/2
    of it, under an outer scale for 256 instead of 448 ("four over six", arXiv 2512.02010); its own of equals.
    """

    NONE = "none"
    MSE = "mse"
    MAE = "mae"
    MAX = "max"


class Correction(Enum):
    """What is multiplied into scales after rounding to nearest, so that the error of rounding has no part along x:
    EDEN's factor c = sum x**2 / sum x (codes * scale), arXiv 2601.22813.

    ROW    of a row, for all of k, in FP32; of LADDER scales
    GROUP  of 128 elements, into NVFP4's block scales, which are rounded stochastically then: a seed is needed
    """

    NONE = "none"
    ROW = "row"
    GROUP = "group"
