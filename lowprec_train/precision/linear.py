"""nn.Linear with a recipe: precision is a property of the layer, not a subclass of it.

What crosses autograd is flat tensors: the Function takes x and the weight and returns y; codes live between forward and
backward only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.group import all_gather_rows, reduce_scatter_rows
from lowprec_train.numerics.draws import Draws, SeedTable, SiteDraws
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.passes import Observer, Site
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.split import Split


class Linear(nn.Linear):
    """y = x W^T + b with master weights in the parameter's dtype and GEMMs in x's dtype or in the recipe's.

    recipe: a LinearRecipe; the default is bit-equal to F.linear in x's dtype. x [..., in] -> [..., out].
    site: which row of the draws that `forward` takes is this layer's. draws: what it draws from where it is given none,
    from `precision.policy.attach_draws`. A layer outside of a run draws as a run of seed 0 does at its step 0, the same
    bits at every call; in a run, `site` is set, and a call without draws is an error where the recipe draws.
    observer: told of every operand that is rounded; None adds nothing to the pass.
    split: where the weight is one rank's part of a larger one, and x [..., in] this rank's part of the rows (dim 0) or
    of the columns (dim 1) of the whole x; y [1, rows, out] is then this rank's part of the columns, or of the rows.
    gathered: the weight after its all-gather, where it is sharded; None: the parameter itself.
    """

    site: int | None
    draws: SiteDraws | None
    observer: Observer | None
    split: Split | None
    gathered: AllGatheredWeight | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.site = self.draws = self.observer = self.split = self.gathered = None
        self.recipe = LinearRecipe()

    @property
    def recipe(self) -> LinearRecipe:
        """The precision of the three GEMMs; may be set at any time."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: LinearRecipe) -> None:
        self._recipe = recipe
        if recipe.draws and self.draws is None and self.site is None and not self.weight.is_meta:
            self.draws = SeedTable(0, 1, self.weight.device).at(0, 0).site(0)

    def forward(
        self, x: Tensor, maxima: Tensor | None = None, *, hears: bool = False, draws: Draws | None = None
    ) -> Any:
        """y [..., out]; `hears`: (y, an ear), see `heard`. maxima: any tensor whose largest element is max |x|, where
        the kernel that made x left it. draws: of the micro-batch, this layer's at `site`.
        """
        own = self.draws if draws is None or self.site is None else draws.site(self.site)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.split is None:
            y, ear = self._product(x, bias, maxima, own, hears=hears and bias is None)
        else:
            y, ear = self._part(self.split, x.flatten(end_dim=-2), bias, maxima, own, hears=hears and bias is None)
        return (y, ear) if hears else y

    def heard(self, x: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor | None]:
        """(y, an ear): whoever consumes y hands the maxima of y's gradient back as the ear's gradient. The ear is an
        FP32 vector of zeros, one a row; None where no GEMM of this layer would use it, as after a bias.
        """
        heard: tuple[Tensor, Tensor | None] = self(x, hears=True, draws=draws)
        return heard

    def _product(
        self, x: Tensor, bias: Tensor | None, maxima: Tensor | None, draws: SiteDraws | None, *, hears: bool
    ) -> tuple[Tensor, Tensor | None]:
        given = self.gathered
        if self.recipe.is_identity:
            weight = self.weight if given is None else given.tensors[0]
            return F.linear(x, weight.to(x.dtype), bias), None
        seeds = () if draws is None else (draws.seeds, draws.token_rows, draws.token_columns)
        leaf, recipe = (self.weight, None) if given is None else (given.leaf, given.recipe)
        names, tensors = ((), ()) if given is None else (given.names, [each.detach() for each in given.tensors])
        how = (recipe or self.recipe, self.observer, self.split, maxima, hears, names)
        out = _LinearFunction.apply(x.flatten(end_dim=-2), leaf, *how, *tensors, *seeds)
        y, ear = out if hears else (out, None)
        y = y.unflatten(0, (-1, *x.shape[1:-1]))  # of more rows than x has, where their codes were gathered
        return y if bias is None else y + bias, ear

    def _part(
        self,
        split: Split,
        x_MK: Tensor,
        bias: Tensor | None,
        maxima: Tensor | None,
        draws: SiteDraws | None,
        *,
        hears: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of x, or codes of them, are gathered before, or partial sums of y are scattered after, and the bias is
        added to whole sums.
        """
        if split.dim == 0:  # the maxima are those of this rank's rows
            coded = Site(self.recipe, None, self.observer, split).gathers_codes
            whole = x_MK if coded else all_gather_rows(x_MK, split.group)
            y_MN, ear = self._product(whole, bias, None, draws, hears=hears)
            return y_MN.unsqueeze(0), ear
        partial, _ = self._product(x_MK, None, maxima, draws, hears=False)
        y_MN = reduce_scatter_rows(partial, split.group)
        return (y_MN if bias is None else y_MN + bias).unsqueeze(0), None


class _LinearFunction(torch.autograd.Function):
    """x [m, k], leaf [n, k], seeds -> y [m, n], and an ear [m] where it `hears`. The leaf takes the weight's gradient,
    and is the weight where `names` names neither values nor codes of it.
    """

    @staticmethod
    def forward(ctx, x, leaf, recipe, observer, split, maxima, hears, names, *tensors):  # type: ignore[no-untyped-def]
        given, seeds = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        weight = given.pop("w", leaf)
        y, kept = Site(recipe, _draws(seeds), observer, split).forward(x, weight, maxima, given)
        ctx.recipe, ctx.observer, ctx.split, ctx.dtype, ctx.into = recipe, observer, split, x.dtype, leaf.dtype
        ctx.names, ctx.seeds, ctx.tensors = tuple(kept), len(seeds), len(tensors)
        ctx.save_for_backward(weight, *seeds, *kept.values())
        return (y, x.new_zeros(y.shape[0], dtype=torch.float32)) if hears else y

    @staticmethod
    def backward(ctx, dy, maxima=None):  # type: ignore[no-untyped-def]
        weight, *rest = ctx.saved_tensors
        seeds, kept = rest[: ctx.seeds], dict(zip(ctx.names, rest[ctx.seeds :], strict=True))
        site = Site(ctx.recipe, _draws(seeds), ctx.observer, ctx.split)
        needs = ctx.needs_input_grad[:2]
        dx, dw = site.backward(dy.contiguous(), weight, kept, ctx.dtype, needs, maxima, ctx.into)
        return dx, dw, *([None] * (ctx.tensors + 6))


def _draws(seeds: Any) -> SiteDraws | None:
    return SiteDraws(*seeds) if seeds else None
