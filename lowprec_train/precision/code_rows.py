"""The rows of a column-parallel layer's input as codes on their way between ranks: a byte an element where BF16 takes
two, and every rank rounds its own rows alone.

    codes of all rows = gather(codes of mine)          where rows have scales of their own, or all share one

So it goes where the three GEMMs need nothing of X but fprop's codes, and these are rounded to nearest; the bits are
those of rounding after the gather.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.numerics.quantizer import Quantized, ScaleRule, Shared
from lowprec_train.precision.recipe import Gemm, LinearRecipe


def travel_as_codes(recipe: LinearRecipe) -> bool:
    """True when fprop's codes of X are a byte each, are all that is needed, and are found row by row, up to one scale
    of everything.
    """
    fprop, a = recipe.fprop, recipe.fprop.a
    if a is None or not recipe.keeps_codes or fprop.codes_only or fprop.rotation is not None:
        return False
    by_rows = a.tile == (-1, -1) or a.tile[0] == 1
    small = a.format.carrier.itemsize == 1 and not a.stochastic and a.scale is not ScaleRule.NVFP4
    return by_rows and small and (fprop.outliers is None or fprop.outliers.variant == "carrier")


def gathered(x: Tensor, fprop: Gemm, group: Group) -> Quantized:
    """fprop's codes of all ranks' rows, from this rank's rows of x."""
    assert fprop.a is not None
    if fprop.outliers is None:
        mine = fprop.a(x, shared=Shared(dim=0, group=group))
    else:
        mine, _ = fprop.outliers(x, fprop.a, None, None)
    scale = mine.scale if fprop.a.tile[0] == -1 else group.all_gather(mine.scale)
    return replace(mine, codes=group.all_gather(mine.codes), scale=scale)
