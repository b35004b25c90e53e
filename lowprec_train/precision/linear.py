"""nn.Linear with a recipe for its precision.

One class serves all recipes. Its autograd Function takes x and the weight and returns y. Quantised codes exist only
between the forward and the backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.group import all_gather_rows, reduce_scatter_rows, rounded_and_kept
from lowprec_train.numerics.draws import Draws, SeedTable, SiteDraws
from lowprec_train.numerics.quantizer import Quantized
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.backend import BackendLayer, run
from lowprec_train.precision.linear_gemms import LinearGemms, Observer
from lowprec_train.precision.linear_plan import LinearPlan
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.saved import SavedOperand
from lowprec_train.precision.split import Split

PLAN_CACHE_SIZE = 32  # per layer; evaluation calls it with many sequence lengths


class WithDY(Enum):
    """What the op that computes dY returns besides."""

    NOTHING = ""
    AMAX = "the amax of each row"
    CODES = "codes for dgrad, if it can"
    CODES_OR_AMAX = "codes for dgrad, or the amax of each row"


class GradCodes(NamedTuple):
    """Placeholders whose gradients are codes of dY, `codes` E4M3 [m, n] and `scale` FP32 [m, 1]; and arguments of the
    op that makes them: `signs`, the seed of the rotation, and `how`.
    """

    codes: Tensor
    scale: Tensor
    signs: Tensor | None
    how: tuple[Any, ...]


class NormInput(NamedTuple):
    """What an RMSNorm makes X of: x [..., in], rate [..., 1] and weight [in] in FP32, X = x rate weight."""

    x: Tensor
    rate: Tensor
    weight: Tensor


class Linear(nn.Linear):
    """y = x W^T + b. The parameter holds the master weight; GEMMs run in x's dtype or in the recipe's formats.

    x [..., in] -> y [..., out]. Attributes:

    recipe: a LinearRecipe. The default is bit-equal to F.linear in x's dtype.
    site: index of this layer in the seed table that `forward` receives.
    draws: seeds used if `forward` receives none; set by `precision.policy.attach_draws`. By default they are those of
    seed 0 at step 0, the same at every call. A layer with a `site` has no default: calling it without draws is an
    error if the recipe is stochastic.
    observer: called with every operand that is quantised; None costs nothing.
    split: set if the weight is one tensor-parallel rank's shard. x [..., in] is then this rank's shard of the rows
    (dim 0) or of the columns (dim 1), and y [1, rows, out] its shard of the columns or of the rows.
    gathered: the weight after its all-gather if it is sharded by FSDP; None: the parameter itself.
    weight_amax: amax of the whole tensor-parallel weight (`parallel.weight_amax`); None: it is all-reduced here.
    keeps_x, keeps_w: X or its codes, and the codes of W, are saved although `model.recompute` would recompute them.
    compiled_x: in a compiled model, the kernel that makes x is compiled too, so it can compute its amax.
    x_is_saved: the op that makes x saves it for its own backward pass (`LinearPlan.rounding_x_again`).
    rounds_again: what that op saves is rounded again, even if this takes an op more.
    norm: the RMSNorm whose result x is, in a compiled block, where the norm saves its input and not x. In a tuple,
    because it is no part of this layer.
    """

    site: int | None
    draws: SiteDraws | None
    observer: Observer | None
    split: Split | None
    gathered: AllGatheredWeight | None
    weight_amax: Tensor | None
    keeps_x: bool
    keeps_w: bool
    compiled_x: bool
    x_is_saved: bool
    rounds_again: bool
    norm: tuple[nn.Module] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.site = self.draws = self.observer = self.split = self.gathered = self.weight_amax = None
        self.keeps_x = self.keeps_w = False
        self.compiled_x, self.x_is_saved, self.rounds_again, self.norm = True, False, False, None
        self.recipe = LinearRecipe()

    @property
    def recipe(self) -> LinearRecipe:
        """The precision of the three GEMMs; may be set at any time."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: LinearRecipe) -> None:
        self._recipe = recipe
        self._plans: dict[tuple[object, ...], LinearPlan] = {}
        self._prepared: tuple[tuple[object, ...], LinearPlan] | None = None
        self._backend_layer: BackendLayer | None = None
        if recipe.draws and self.draws is None and self.site is None and not self.weight.is_meta:
            self.draws = SeedTable(0, 1, self.weight.device).at(0, 0).site(0)

    @property
    def shard_shape(self) -> tuple[int, int]:
        """Shape [n, k] of the weight, or of this rank's shard."""
        cut = self.split
        n = cut.part if cut is not None and cut.dim == 0 else self.out_features
        return n, cut.part if cut is not None and cut.dim == 1 else self.in_features

    def plan(self, tokens: int, dtype: torch.dtype, device: torch.device) -> LinearPlan:
        """The layer's plan for this number of rows of x. Plans are cached per recipe, up to PLAN_CACHE_SIZE.

        While torch.compile traces, the plan that `prepare` has made is used, or the plan is compiled in the trace:
        filling the cache would be a side effect.
        """
        key = self._plan_key(tokens, dtype, device)
        if torch.compiler.is_compiling():
            ready = self._prepared
            return ready[1] if ready is not None and ready[0] == key else self._compile_plan(tokens, dtype, device)
        if key not in self._plans:
            if len(self._plans) == PLAN_CACHE_SIZE:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self._compile_plan(tokens, dtype, device)
        return self._plans[key]

    def prepare(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the plan for `rows` rows of x on this rank before a graph that uses it: else torch.compile traces how
        plans are compiled, which under `fp8` takes longer than all the rest of a block.
        """
        if self.split is not None or not self.recipe.takes_values:
            tokens = rows if self.split is None else rows * self.split.group.size
            self._prepared = self._plan_key(tokens, dtype, device), self.plan(tokens, dtype, device)

    @property
    def _making(self) -> tuple[bool, bool]:
        """Whether kernels may make operands with others, and whether the weight is all-gathered as codes."""
        return self.observer is None, self.gathered is not None and self.gathered.coded

    @property
    def saves_norm_input(self) -> bool:
        """Whether the layer takes a `NormInput`, which it saves instead of codes of x if its plan allows that."""
        return self.norm is not None and self.norm[0].quantizer is None and self.split is None

    def _plan_key(self, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
        flags = self.keeps_x, self.keeps_w, self.compiled_x, self.x_is_saved, self.rounds_again, self.saves_norm_input
        return tokens, dtype, device, *self._making, self.split is None, *flags

    def _compile_plan(self, tokens: int, dtype: torch.dtype, device: torch.device) -> LinearPlan:
        fused, coded = self._making
        plan = compile_plan(
            self.recipe, self.shard_shape, tokens, device, dtype=dtype, split=self.split, fused=fused, gathered=coded
        )
        return self.placed(plan)

    def placed(self, plan: LinearPlan) -> LinearPlan:
        """Return the plan with what this layer knows about the ops around it."""
        plan = replace(plan, keeps_x=self.keeps_x, keeps_w=self.keeps_w, compiled_x=self.compiled_x)
        again = self.x_is_saved or self.saves_norm_input
        return plan.rounding_x_again(self.saves_norm_input, self.rounds_again) if again else plan

    def backend_layer(self) -> BackendLayer:
        """The backend's implementation of this layer; created once per recipe."""
        if self._backend_layer is None:
            assert self.recipe.backend is not None
            bias = self.bias is not None
            self._backend_layer = self.recipe.backend.layer(*self.shard_shape, bias=bias, dtype=torch.bfloat16)
        return self._backend_layer

    def forward(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        *,
        with_dy: WithDY = WithDY.NOTHING,
        draws: Draws | None = None,
        norm_input: NormInput | None = None,
    ) -> Any:
        """y [..., out]; with `with_dy`, what `with_grad_amax` or `with_grad_codes` returns.

        amax: a tensor whose largest element is max |x|, if the kernel that produced x wrote one. draws: seeds of the
        micro-batch; this layer uses those at `site`. norm_input: of x, if `saves_norm_input`.
        """
        site_draws = self.draws if draws is None or self.site is None else draws.site(self.site)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        wanted = with_dy if bias is None else WithDY.NOTHING
        if self.split is None:
            y, placeholder = self._product(x, bias, amax, site_draws, wanted, norm_input=norm_input)
        else:
            y, placeholder = self._sharded(self.split, x.flatten(end_dim=-2), bias, amax, site_draws, wanted)
        return y if with_dy is WithDY.NOTHING else (y, placeholder)

    def with_grad_amax(
        self, x: Tensor, draws: Draws | None = None, norm_input: NormInput | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(y, grad_amax). grad_amax is an FP32 vector of zeros, one element per row, or None if no GEMM of the backward
        pass would use it: with a bias, in BF16, under another library's backend, or if dY is divided between ranks.

        The consumer of y returns the amax of dY as the gradient of `grad_amax`, which spares this layer a pass over dY.
        """
        result: tuple[Tensor, Tensor | None] = self(x, with_dy=WithDY.AMAX, draws=draws, norm_input=norm_input)
        return result

    def with_grad_codes(
        self, x: Tensor, draws: Draws | None = None, norm_input: NormInput | None = None
    ) -> tuple[Tensor, GradCodes | None]:
        """(y, grad_codes) if dgrad can use codes of dY from the op that computes it; else (y, None).

        The consumer of y returns codes and scales as gradients of `GradCodes`, which spares this layer a pass over dY.
        """
        how = {"with_dy": WithDY.CODES, "draws": draws, "norm_input": norm_input}
        result: tuple[Tensor, GradCodes | None] = self(x, **how)
        return result

    def with_grad_codes_or_amax(
        self, x: Tensor, draws: Draws | None = None, norm_input: NormInput | None = None
    ) -> tuple[Tensor, GradCodes | Tensor | None]:
        """`with_grad_codes` if that returns codes, else `with_grad_amax`."""
        how = {"with_dy": WithDY.CODES_OR_AMAX, "draws": draws, "norm_input": norm_input}
        result: tuple[Tensor, GradCodes | Tensor | None] = self(x, **how)
        return result

    def _product(
        self,
        x: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        draws: SiteDraws | None,
        with_dy: WithDY,
        plan: LinearPlan | None = None,
        norm_input: NormInput | None = None,
    ) -> tuple[Tensor, GradCodes | Tensor | None]:
        given, rows = self.gathered, x.flatten(end_dim=-2)
        if self.recipe.takes_values:
            weight = self.weight if given is None else given.tensors[0]
            if self.recipe.backend is not None:
                return run(self.backend_layer, x, weight, bias), None
            x = rounded_and_kept(x, x.dtype) if self.keeps_x else x
            return F.linear(x, weight.to(x.dtype), bias), None
        seeds = () if draws is None else (draws.seeds, draws.token_rows, draws.token_columns)
        leaf, coded = (self.weight, False) if given is None else (given.leaf, given.coded)
        tensors = () if given is None else tuple(each.detach() for each in given.tensors)
        plan = self.plan(rows.shape[0], x.dtype, x.device) if plan is None else plan
        if with_dy in (WithDY.CODES, WithDY.CODES_OR_AMAX):
            other = WithDY.AMAX if with_dy is WithDY.CODES_OR_AMAX else WithDY.NOTHING
            with_dy = WithDY.CODES if plan.dgrad.a.needs_only_dy and x.dtype.itemsize == 2 else other
        arguments = (plan, self.observer, self.split, amax, self.weight_amax, with_dy, coded, len(seeds))
        if plan.saved_x.from_norm:
            if norm_input is None:
                raise ValueError(
                    "this layer saves the input of the norm before it, and takes it as norm_input (RMSNorm.norm_input)"
                )
            tensors += norm_input.x.detach().view_as(rows), norm_input.rate, norm_input.weight.detach()
        out = _LinearFunction.apply(rows, leaf, *arguments, *seeds, *tensors)
        y, *placeholders = out if isinstance(out, tuple) else (out,)
        y = y.unflatten(0, (-1, *x.shape[1:-1]))  # more rows than x if its codes were gathered
        y = y if bias is None else y + bias
        if with_dy is not WithDY.CODES:
            return y, placeholders[0] if placeholders else None
        signs, *how = LinearGemms(plan, draws).ladder(plan.dgrad.a)
        codes, scale = placeholders
        return y, GradCodes(codes, scale, signs, tuple(how))

    def _sharded(
        self,
        split: Split,
        x_MK: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        draws: SiteDraws | None,
        with_dy: WithDY,
    ) -> tuple[Tensor, GradCodes | Tensor | None]:
        """The tensor-parallel layer: all-gathers x or its codes first (dim 0), or reduce-scatters y after (dim 1).

        With dim 1 the bias is added after the reduction.
        """
        if split.dim == 0:  # `amax` is not used: it covers this rank's rows only
            plan = self.plan(x_MK.shape[0] * split.group.size, x_MK.dtype, x_MK.device)
            x_MK = x_MK if plan.gathers_rows else all_gather_rows(x_MK, split.group)
            y_MN, placeholder = self._product(x_MK, bias, None, draws, with_dy, plan)
            return y_MN.unsqueeze(0), placeholder
        partial, own_dy = self._product(x_MK, None, amax, draws, WithDY.NOTHING)
        assert own_dy is None or isinstance(own_dy, Tensor)
        y_MN = reduce_scatter_rows(partial, split.group, own_dy)
        return (y_MN if bias is None else y_MN + bias).unsqueeze(0), None


class _LinearFunction(torch.autograd.Function):
    """x [m, k], leaf [n, k] -> y [m, n], and placeholders if their gradients are needed: [m] for the amax of dy, or
    codes [m, n] and scales [m, 1], by `with_dy`; [m / ranks, n] for this rank's rows of dy, instead of y's gradient, if
    the plan gathers dY.

    The leaf receives the weight's gradient. tensors: `drawn` seeds, then the weight's values or codes if the leaf is
    not the weight, then a `NormInput` if the plan saves it.
    """

    @staticmethod
    def forward(ctx, x, leaf, plan, observer, split, amax, weight_amax, with_dy, coded, drawn, *tensors):  # type: ignore[no-untyped-def]
        end = len(tensors) - 3 * plan.saved_x.from_norm
        seeds, given, norm_input = tensors[:drawn], tensors[drawn:end], tensors[end:]
        weight = given[0] if given and not coded else leaf
        gathered = SavedOperand(plan.saved_w, given) if coded else None
        gemms = LinearGemms(plan, _draws(seeds), observer, split)
        y, saved = gemms.forward(x, weight, amax, gathered, weight_amax, norm_input)
        ctx.gemms_of, ctx.dtype, ctx.into = (plan, observer, split), x.dtype, leaf.dtype
        ctx.drawn, ctx.tensors, ctx.with_dy = drawn, len(tensors), with_dy
        ctx.save_for_backward(weight, *seeds, *saved)
        if plan.gathers_dy:
            return y, y.new_zeros(()).expand(y.shape[0] // split.group.size, y.shape[1])
        if with_dy is WithDY.AMAX:
            return y, x.new_zeros(y.shape[0], dtype=torch.float32)
        if with_dy is WithDY.CODES:
            return y, *(y.new_zeros((), dtype=dtype).expand(y.shape[0], n) for dtype, n in _codes_of(y))
        return y

    @staticmethod
    def backward(ctx, dy, *of_placeholders):  # type: ignore[no-untyped-def]
        weight, *rest = ctx.saved_tensors
        plan, observer, split = ctx.gemms_of
        dy = of_placeholders[0] if plan.gathers_dy else dy
        amax = of_placeholders[0] if ctx.with_dy is WithDY.AMAX else None
        ready = Quantized(*of_placeholders) if ctx.with_dy is WithDY.CODES else None
        gemms = LinearGemms(plan, _draws(rest[: ctx.drawn]), observer, split)
        saved, needs = tuple(rest[ctx.drawn :]), ctx.needs_input_grad[:2]
        dx, dw = gemms.backward(dy.contiguous(), weight, saved, ctx.dtype, needs, amax, ctx.into, ready)
        return dx, dw, *([None] * (ctx.tensors + 8))


def _codes_of(dy: Tensor) -> tuple[tuple[torch.dtype, int], ...]:
    """Return dtype and number of columns of the codes of dy, and of their scales."""
    return (torch.float8_e4m3fn, dy.shape[1]), (torch.float32, 1)


def _draws(seeds: Any) -> SiteDraws | None:
    return SiteDraws(*seeds) if seeds else None
