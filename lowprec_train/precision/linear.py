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
from lowprec_train.precision.backend import BackendLayer, run
from lowprec_train.precision.linear_gemms import LinearGemms, Observer
from lowprec_train.precision.linear_plan import LinearPlan
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.saved import SavedOperand
from lowprec_train.precision.split import Split

PLANS = 32  # that a layer holds: texts of every length are evaluated, one after the other


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
    weight_amax: of a weight that is cut, what makes the scale of the whole (`parallel.weight_amax`); None: ranks ask.
    """

    site: int | None
    draws: SiteDraws | None
    observer: Observer | None
    split: Split | None
    gathered: AllGatheredWeight | None
    weight_amax: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.site = self.draws = self.observer = self.split = self.gathered = self.weight_amax = None
        self.recipe = LinearRecipe()

    @property
    def recipe(self) -> LinearRecipe:
        """The precision of the three GEMMs; may be set at any time."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: LinearRecipe) -> None:
        self._recipe = recipe
        self._plans: dict[tuple[object, ...], LinearPlan] = {}
        self._backend_layer: BackendLayer | None = None
        if recipe.draws and self.draws is None and self.site is None and not self.weight.is_meta:
            self.draws = SeedTable(0, 1, self.weight.device).at(0, 0).site(0)

    @property
    def part(self) -> tuple[int, int]:
        """Shape of the weight [n, k], or of this rank's part of it."""
        cut = self.split
        n = cut.part if cut is not None and cut.dim == 0 else self.out_features
        return n, cut.part if cut is not None and cut.dim == 1 else self.in_features

    def plan(self, tokens: int, dtype: torch.dtype, device: torch.device) -> LinearPlan:
        """What this layer does with so many rows of x in its GEMMs; made once under a recipe; the last few are held.

        In a compiled region it is made while the region is traced: a table that is filled there would be a side effect.
        """
        fused, coded = self.observer is None, self.gathered is not None and self.gathered.coded
        key = (tokens, dtype, device, fused, coded, self.split is None)
        compiling = torch.compiler.is_compiling()
        if not compiling and key in self._plans:
            return self._plans[key]
        made = compile_plan(
            self.recipe, self.part, tokens, device, dtype=dtype, split=self.split, fused=fused, gathered=coded
        )
        if not compiling:
            if len(self._plans) == PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = made
        return made

    def backend_layer(self) -> BackendLayer:
        """What runs this layer where its recipe names a backend; made once under a recipe."""
        if self._backend_layer is None:
            assert self.recipe.backend is not None
            bias = self.bias is not None
            self._backend_layer = self.recipe.backend.layer(*self.part, bias=bias, dtype=torch.bfloat16)
        return self._backend_layer

    def forward(
        self, x: Tensor, amax: Tensor | None = None, *, with_grad_amax: bool = False, draws: Draws | None = None
    ) -> Any:
        """y [..., out]; `with_grad_amax`: as that method returns. amax: any tensor whose largest element is max |x|,
        where the kernel that made x left it. draws: of the micro-batch, this layer's at `site`.
        """
        own = self.draws if draws is None or self.site is None else draws.site(self.site)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        wanted = with_grad_amax and bias is None
        if self.split is None:
            y, grad_amax = self._product(x, bias, amax, own, wanted)
        else:
            y, grad_amax = self._part(self.split, x.flatten(end_dim=-2), bias, amax, own, wanted)
        return (y, grad_amax) if with_grad_amax else y

    def with_grad_amax(self, x: Tensor, draws: Draws | None = None) -> tuple[Tensor, Tensor | None]:
        """(y, grad_amax): whoever consumes y hands the amax of dY back as the gradient of `grad_amax`, an FP32
        vector of zeros, one a row; None where no GEMM of this layer would use it, as after a bias.
        """
        found: tuple[Tensor, Tensor | None] = self(x, with_grad_amax=True, draws=draws)
        return found

    def _product(
        self,
        x: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        draws: SiteDraws | None,
        wanted: bool,
        plan: LinearPlan | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        given, rows = self.gathered, x.flatten(end_dim=-2)
        if self.recipe.takes_values:
            weight = self.weight if given is None else given.tensors[0]
            if self.recipe.backend is not None:
                return run(self.backend_layer, x, weight, bias), None
            return F.linear(x, weight.to(x.dtype), bias), None
        seeds = () if draws is None else (draws.seeds, draws.token_rows, draws.token_columns)
        leaf, coded = (self.weight, False) if given is None else (given.leaf, given.coded)
        tensors = () if given is None else tuple(each.detach() for each in given.tensors)
        plan = self.plan(rows.shape[0], x.dtype, x.device) if plan is None else plan
        how = (plan, self.observer, self.split, amax, self.weight_amax, wanted, coded, len(seeds))
        out = _LinearFunction.apply(rows, leaf, *how, *seeds, *tensors)
        y, grad_amax = out if wanted else (out, None)
        y = y.unflatten(0, (-1, *x.shape[1:-1]))  # of more rows than x has, where their codes were gathered
        return y if bias is None else y + bias, grad_amax

    def _part(
        self,
        split: Split,
        x_MK: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        draws: SiteDraws | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of x, or codes of them, are gathered before, or partial sums of y are scattered after, and the bias is
        added to whole sums.
        """
        if split.dim == 0:  # the amax is that of this rank's rows
            plan = self.plan(x_MK.shape[0] * split.group.size, x_MK.dtype, x_MK.device)
            x_MK = x_MK if plan.gathers_rows else all_gather_rows(x_MK, split.group)
            y_MN, grad_amax = self._product(x_MK, bias, None, draws, wanted, plan)
            return y_MN.unsqueeze(0), grad_amax
        partial, _ = self._product(x_MK, None, amax, draws, wanted=False)
        y_MN = reduce_scatter_rows(partial, split.group)
        return (y_MN if bias is None else y_MN + bias).unsqueeze(0), None


class _LinearFunction(torch.autograd.Function):
    """x [m, k], leaf [n, k] -> y [m, n], and the stand-in [m] for the amax of dy where it is `wanted`. The leaf takes
    the weight's gradient. tensors: seeds, then the weight's values or codes where the leaf is not the weight.
    """

    @staticmethod
    def forward(ctx, x, leaf, plan, observer, split, amax, weight_amax, wanted, coded, drawn, *tensors):  # type: ignore[no-untyped-def]
        seeds, given = tensors[:drawn], tensors[drawn:]
        weight = given[0] if given and not coded else leaf
        gathered = SavedOperand(plan.saved_w, given) if coded else None
        gemms = LinearGemms(plan, _draws(seeds), observer, split)
        y, saved = gemms.forward(x, weight, amax, gathered, weight_amax)
        ctx.gemms_of, ctx.dtype, ctx.into = (plan, observer, split), x.dtype, leaf.dtype
        ctx.drawn, ctx.tensors = drawn, len(tensors)
        ctx.save_for_backward(weight, *seeds, *saved)
        return (y, x.new_zeros(y.shape[0], dtype=torch.float32)) if wanted else y

    @staticmethod
    def backward(ctx, dy, amax=None):  # type: ignore[no-untyped-def]
        weight, *rest = ctx.saved_tensors
        plan, observer, split = ctx.gemms_of
        gemms = LinearGemms(plan, _draws(rest[: ctx.drawn]), observer, split)
        saved, needs = tuple(rest[ctx.drawn :]), ctx.needs_input_grad[:2]
        dx, dw = gemms.backward(dy.contiguous(), weight, saved, ctx.dtype, needs, amax, ctx.into)
        return dx, dw, *([None] * (ctx.tensors + 8))


def _draws(seeds: Any) -> SiteDraws | None:
    return SiteDraws(*seeds) if seeds else None
