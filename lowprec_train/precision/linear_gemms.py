"""Run the three GEMMs of one linear layer by its plan.

    forward     Y  = X W^T; saves X or its codes, and the codes of W if dgrad reuses them
    backward    dX = dY W,  dW = f'(dY^T X)

`precision.plan` makes all decisions; this module executes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowprec_train.group import rounded
from lowprec_train.numerics import rotated
from lowprec_train.numerics.draws import SiteDraws
from lowprec_train.numerics.one_scale import amax_of_rows, quantize_repeatably, under_amax
from lowprec_train.numerics.pairs import both
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule, Shared
from lowprec_train.precision.gemm import accumulate, carrier_of, cast, multiply
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear_plan import GemmPlan, LinearPlan, Op, OperandPlan, Source
from lowprec_train.precision.mean_split import Means, mean_product, rank_one, split_means, without_mean
from lowprec_train.precision.outliers import Residual
from lowprec_train.precision.saved import SavedForm, SavedOperand, flatten, unflatten
from lowprec_train.precision.split import Split

Observer = Callable[[OperandPlan, Tensor, Quantized], None]
"""Called with every quantised operand: its plan, the quantiser's input and the result."""

Factor = Tensor | None
"""Row scales [1, k] of one operand, multiplied into the other operand before that is rounded."""


@dataclass(frozen=True)
class LinearGemms:
    """One linear layer in one pass.

    draws: None for a deterministic recipe. split: set if x, weight and dy are this rank's shards. Codes and scales are
    then equal to the same shards of the unsharded layer.
    """

    plan: LinearPlan
    draws: SiteDraws | None = None
    observer: Observer | None = None
    split: Split | None = None

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        amax: Tensor | None = None,
        gathered: SavedOperand | None = None,
        weight_amax: Tensor | None = None,
        norm_input: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [m, k], weight [n, k] -> (y [m, n] in x's dtype, tensors that `backward` needs besides the weight).

        amax: a tensor whose largest element is max |x|, if available. gathered: all-gathered codes of the weight; then
        only the dtype of `weight` is used, for dw. weight_amax: amax of the whole weight, if already all-reduced.
        norm_input: a `NormInput`, if the plan saves it.
        """
        fprop, w = self.plan.fprop, weight if gathered else cast(weight, x.dtype)
        rest, mean = without_mean(x) if self.plan.needs_x_mean else (x, None)
        codes_x, residual, saved_x = self._input(x, rest, amax, norm_input)
        saved_x = saved_x.kept() if self.plan.keeps_x else saved_x
        codes_w, saved_w = self._weight(w, weight_amax) if gathered is None else (gathered.codes(), gathered)
        if self.plan.keeps_w and saved_w is not None and gathered is None:
            saved_w = saved_w.kept()
        more = (weight_amax if self.plan.recomputes_w else None, mean if self.plan.saves_mean else None)
        saved = flatten(saved_x, saved_w) + tuple(each for each in more if each is not None)
        if fprop.codes_only:
            return self._product(fprop, x, w, x.dtype), saved
        a, b = x if codes_x is None else codes_x, w if codes_w is None else codes_w
        row = mean_product(mean, w) if fprop.a.mean_split and mean is not None else None
        if residual is None:
            return self._with_row(fprop, a, b, row, x.dtype), saved
        y = self._with_row(fprop, a, b, row, torch.float32)
        return rounded(y + accumulate(residual.dense(x.dtype), w), x.dtype), saved

    def backward(
        self,
        dy: Tensor,
        weight: Tensor,
        saved: tuple[Tensor, ...],
        dtype: torch.dtype,
        needs: tuple[bool, bool],
        amax: Tensor | None = None,
        into: torch.dtype | None = None,
        ready: Quantized | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dy [m, n] -> (dx [m, k] in `dtype`, dw [n, k] in `into` or the weight's dtype).

        If the plan gathers dY, dy is this rank's rows of it. needs: whether dx and dw are needed; otherwise they are
        None. amax: a tensor whose largest element is max |dy|, if available. ready: dgrad's codes of dy, if available.
        """
        plan, into = self.plan, into or weight.dtype
        x, w = unflatten(saved, plan.saved_x, plan.saved_w)
        assert x is not None
        if plan.recomputes_w:
            weight = torch.ops.lowprec.copy_weight(weight, dtype, dy)
            spec, whole_amax = plan.fprop.b, saved[x.form.count : len(saved) - plan.saves_mean]
            codes_w = replace(self, observer=None)._rounded(spec, weight, *whole_amax)
            w = SavedOperand.of(SavedForm(quantizer=spec.quantizer), codes_w)
        x, means = split_means(plan, x, saved, dy) if plan.needs_dy_mean else (x, None)
        by_token, by_channel = (means.rest if means and each.a.mean_split else dy for each in (plan.dgrad, plan.wgrad))
        whole = plan.saved_x.residual or plan.adds_means
        product = torch.float32 if whole else into if plan.straight_through else None
        with_row = means is not None and plan.dgrad.a.mean_split and needs[0]
        row = mean_product(means.dy, cast(weight, dtype).t()) if with_row and means else None
        dx: Tensor | None = None
        dw: Tensor | None = None
        if all(needs) and plan.dgrad.a.op is Op.QUANTIZE_BOTH:
            (b, across), (b_t, down) = self._weight_t(weight, w, dtype, dy), self._input_t(x, dtype, dy)
            a, a_t = self._both(plan.dgrad.a, plan.wgrad.a.quantizer, by_token, amax, across, down)
            dx, dw = self._with_row(plan.dgrad, a, b, row, dtype), self._product(plan.wgrad, a_t, b_t, product)
        else:
            shared = all(needs) and plan.wgrad.a.source is Source.DGRAD_CODES
            rounded = self._gathered_rows if plan.gathers_dy else self._rounded
            codes = rounded(plan.dgrad.a, by_token) if shared or plan.gathers_dy else None
            dx = self._dgrad(by_token, codes or ready, weight, w, row, dtype) if needs[0] else None
            dw = self._wgrad(by_channel, codes, x, dtype, product) if needs[1] else None
        if dx is not None and self.split is not None and plan.gathers_rows:
            dx = self.split.group.reduce_scatter(dx)
        return dx, None if dw is None else self._estimated(by_channel, dw, weight, x, w, means, dtype, into)

    # --- forward ---

    def _input(
        self, x: Tensor, rest: Tensor, amax: Tensor | None, norm_input: tuple[Tensor, ...]
    ) -> tuple[Quantized | None, Residual | None, SavedOperand]:
        """Return codes of X, its outliers, and X as it is saved for backward. rest: X, or X minus its mean."""
        spec, form, later = self.plan.fprop.a, self.plan.saved_x, self.plan.wgrad.b
        codes = codes_t = residual = None
        if norm_input and form.folded:
            return self._folded(spec, norm_input[0], None, None, *norm_input[1:]), None, SavedOperand(form, norm_input)
        if form.rounded_again and not form.folded:
            assert spec.quantizer is not None
            codes, level = quantize_repeatably(spec.quantizer, x, norm_input, form.transposed)
            return codes, None, SavedOperand(form, (*(norm_input[:1] or (x,)), level, *norm_input[1:]))
        if spec.source is Source.ALL_GATHERED:
            codes = self._gathered_rows(spec, rest)
        elif spec.op is Op.QUANTIZE_OUTLIERS:
            codes, residual = self._clamped(spec, rest)
        elif spec.op is Op.ROTATE_FOLD:
            codes = self._folded(spec, rest)
        elif spec.op is Op.QUANTIZE_BOTH:
            codes, codes_t = self._both(spec, form.quantizer, rest, amax)
        elif spec.quantizer is not None:
            codes = self._rounded(spec, rest, amax=amax)
        if form.quantizer is None:
            return codes, residual, SavedOperand(form, (x,))
        if form.rounded_again:  # codes of FOLD3
            return codes, residual, SavedOperand(form, (x,))
        if codes_t is None and later.source is Source.FORWARD:
            folds = later.op is Op.ROTATE_FOLD
            codes_t = self._folded(later, rest) if folds else self._rounded(later, rest.t().contiguous())
        elif form.transposed and codes_t is None:
            assert codes is not None
            codes_t = codes.t()
        saved = codes_t if form.transposed else codes
        assert saved is not None
        return codes, residual, SavedOperand.of(form, saved, residual)

    def _gathered_rows(self, spec: OperandPlan, x: Tensor) -> Quantized:
        """Quantise this rank's rows of X for fprop or of dY for dgrad, and all-gather the codes."""
        assert self.split is not None and spec.quantizer is not None
        group, whole = self.split.group, spec.quantizer.tile[0] == -1
        if spec.op is Op.ROTATE_FOLD:
            mine = self._folded(spec, x)
        elif spec.outliers is None:
            mine = spec.quantizer(x, shared=Shared(dim=0, group=group))
        else:
            mine, _ = spec.outliers(x, spec.quantizer, None, None)
        assert not mine.parts, "scales of several levels are not gathered"
        scale = mine.scale if whole else group.all_gather(mine.scale, repeatable=True)
        return replace(mine, codes=group.all_gather(mine.codes, repeatable=True), scale=scale)

    def _weight(self, w: Tensor, amax: Tensor | None) -> tuple[Quantized | None, SavedOperand | None]:
        """Return the codes of W, or None if no GEMM uses them, and what is saved of them for backward."""
        spec, form = self.plan.fprop.b, self.plan.saved_w
        if spec.quantizer is None:
            return None, None
        if spec.op is Op.QUANTIZE_BOTH:
            assert form is not None
            codes, codes_t = self._both(spec, form.quantizer, w, whole_amax=amax)
            return codes, SavedOperand.of(form, codes_t)
        codes = self._folded(spec, w) if spec.op is Op.ROTATE_FOLD else self._rounded(spec, w, amax)
        return codes, None if form is None else SavedOperand.of(form, codes)

    # --- backward ---

    def _weight_t(
        self, weight: Tensor, w: SavedOperand | None, dtype: torch.dtype, dy: Tensor
    ) -> tuple[Tensor | Quantized, Factor]:
        """Return W^T [k, n] or its codes, and their row scales if these are multiplied into dY. dy: not read."""
        spec = self.plan.dgrad.b
        if spec.source is Source.FPROP_CODES:
            assert w is not None
            return (
                w.folded_transpose(self.split, dy)
                if spec.folded
                else self.plan.dgrad.a.scale_apart(w.transposed_codes(dy))
            )
        matrix = cast(weight if w is None or w.form.scale_only else w.codes().dequantize(dtype), dtype)
        if spec.op is Op.ROTATE_FOLD:
            return self._folded(spec, matrix, after=dy if weight.dtype == dtype else None), None
        return self._operand(spec, matrix.t().contiguous()), None

    def _input_t(self, x: SavedOperand, dtype: torch.dtype, dy: Tensor) -> tuple[Tensor | Quantized, Factor]:
        """Return X^T [k, m] or its codes, and their row scales if these are multiplied into dY^T. dy: not read."""
        spec, plain = self.plan.wgrad.b, x.form.quantizer is None
        if spec.source is Source.FORWARD:
            return x.codes(), None
        if spec.source is Source.FPROP_CODES or spec.op is Op.QUANTIZE_TRANSPOSED:
            return self.plan.wgrad.a.scale_apart(x.transposed_codes(dy if x.form.rounded_again else None))
        if spec.op is Op.ROTATE_FOLD:
            if plain:
                return self._folded(spec, x.tensors[0]), None
            if x.form.rounded_again and not x.form.folded:
                return self._folded(spec, *x.tensors[:2], dy, *x.tensors[2:]), None
            if x.form.rounded_again:
                codes = self._folded(self.plan.fprop.a, x.tensors[0], None, dy, *x.tensors[1:])
            else:
                codes = x.codes()
            return self._folded(spec, codes.codes, codes.scale), None
        matrix = x.tensors[0] if plain else cast(x.codes().dequantize(dtype), dtype)
        return self._operand(spec, matrix.t().contiguous()), None

    def _dgrad(
        self,
        dy: Tensor,
        codes: Quantized | None,
        weight: Tensor,
        w: SavedOperand | None,
        row: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        b, factor = self._weight_t(weight, w, dtype, dy)
        a = codes or self._gradient(self.plan.dgrad.a, dy, factor)
        return self._with_row(self.plan.dgrad, a, b, row, dtype)

    def _wgrad(
        self, dy: Tensor, codes: Quantized | None, x: SavedOperand, dtype: torch.dtype, product: torch.dtype | None
    ) -> Tensor:
        wgrad = self.plan.wgrad
        if wgrad.path is Path.BF16 and x.form.quantizer is None:  # bit-equal to nn.Linear's backward
            return cast(dy.t() @ x.tensors[0], product or torch.float32)
        b, factor = self._input_t(x, dtype, dy)
        return self._product(wgrad, codes.t() if codes else self._gradient(wgrad.a, dy, factor), b, product)

    def _gradient(self, spec: OperandPlan, dy: Tensor, factor: Factor) -> Tensor | Quantized:
        """Return dY or dY^T as the operand of its GEMM."""
        if spec.op is Op.ROTATE_FOLD:
            return self._folded(spec, dy)
        a = dy.t().contiguous() if spec.transposed else dy
        return self._operand(spec, a if factor is None else a.float() * factor)

    def _estimated(
        self,
        dy: Tensor,
        dw: Tensor,
        weight: Tensor,
        x: SavedOperand,
        w: SavedOperand | None,
        means: Means | None,
        dtype: torch.dtype,
        into: torch.dtype,
    ) -> Tensor:
        """Return the weight's gradient from wgrad's product: add terms of residual and means, apply the estimator."""
        if x.form.residual:
            rest = x.residual(dw.shape[1]).dense(dtype)
            dw = dw + accumulate(dy.t().contiguous(), rest.t().contiguous())
        if means is not None and means.x is not None:
            dw = dw + rank_one(means.dy, means.x, dy.shape[0])
        if not self.plan.straight_through:
            assert w is not None
            dw = self.plan.estimator(dw, cast(weight, dtype), w.scale(), into)
        return cast(dw, into)

    # --- operands ---

    def _product(
        self, spec: GemmPlan, a: Tensor | Quantized, b: Tensor | Quantized, dtype: torch.dtype | None
    ) -> Tensor:
        return multiply(a, b, spec.path, split_accumulation=spec.split_accumulation, dtype=dtype)

    def _with_row(
        self, spec: GemmPlan, a: Tensor | Quantized, b: Tensor | Quantized, row: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the product, plus an FP32 row that is added for every token, if given."""
        if row is None:
            return self._product(spec, a, b, dtype)
        return rounded(self._product(spec, a, b, torch.float32) + row, dtype)

    def _operand(self, spec: OperandPlan, x: Tensor) -> Tensor | Quantized:
        return x if spec.quantizer is None else self._rounded(spec, x)

    def _rounded(
        self, spec: OperandPlan, x: Tensor, whole_amax: Tensor | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Rotate and quantise x [m, k], in one op if possible. whole_amax: `Shared.amax`. amax: as for `forward`."""
        assert spec.quantizer is not None
        noise, shared = self._noise(spec), self._shared(spec, whole_amax)
        signs, block = self._signs(spec)
        if not spec.needs_only_amax:
            amax = None
        elif amax is None and self.plan.compiles(spec):
            amax = amax_of_rows(x)
        if spec.op is Op.ROUND:
            return rotated.values(spec.quantizer, x, signs, block, *noise, shared)
        if block and rotated.rotates(spec.quantizer, spec.cut) and self.observer is None:
            return rotated.of_rotated(spec.quantizer, x, signs, block, *noise, shared)
        x = self._rotated(spec, x)
        codes = spec.quantizer(x, *noise, shared) if amax is None else under_amax(spec.quantizer, x, amax, *noise)
        self._observe(spec, x, codes)
        return codes

    def _clamped(self, spec: OperandPlan, x: Tensor) -> tuple[Quantized, Residual | None]:
        """Return codes of the rotated and clamped x, and its outliers."""
        assert spec.outliers is not None and spec.quantizer is not None
        x, split = self._rotated(spec, x), None if spec.cut is None else self.split
        codes, residual = spec.outliers(x, spec.quantizer, *self._noise(spec), split)
        self._observe(spec, x, codes)
        return codes, residual

    def _both(
        self,
        spec: OperandPlan,
        second: Quantizer | None,
        x: Tensor,
        amax: Tensor | None = None,
        across: Factor = None,
        down: Factor = None,
        whole_amax: Tensor | None = None,
    ) -> tuple[Quantized, Quantized]:
        """Quantise x, and its transpose by `second`, in one op; each is first multiplied by its factor."""
        assert spec.quantizer is not None and second is not None
        factors = {"across": across, "down": None if down is None else down.t()}
        produced, shared = self.plan.compiles(spec), self._shared(spec, whole_amax)
        amax = None if spec.mean_split else amax  # `amax` is that of x before its mean was subtracted
        return both(x, spec.quantizer, second, **factors, amax=amax, produced=produced, shared=shared)

    def _folded(
        self, spec: OperandPlan, x: Tensor, scale: Tensor | None = None, after: Tensor | None = None, *norm: Tensor
    ) -> Quantized:
        """Rotate, quantise and fold an operand. x: the untransposed matrix, or its codes or values if `scale` is given;
        with `norm`, rates and weight, what the norm makes it of.
        """
        quantizer = spec.quantizer
        assert quantizer is not None
        if quantizer.scale is ScaleRule.LADDER:
            kernel = quantizer.kernel("rotate_fold_ladder", x.device)
            return Quantized(*kernel(x, scale, spec.transposed, *self.ladder(spec), after, *norm))
        signs, block = self._signs(spec)
        within, kernel = quantizer.exponent_span, quantizer.kernel("rotate_fold", x.device)
        rule = (quantizer.scale.value, quantizer.range_share, within, carrier_of(within), quantizer.rounding.name)
        codes, row = kernel(x, scale, spec.transposed, signs, block, *rule, *self._noise(spec), after)
        return Quantized(codes, row, exponent_span=within)

    def ladder(self, spec: OperandPlan) -> tuple[Any, ...]:
        """Return the arguments of `rotate_fold_ladder` for an operand, from `signs` to `corrected`."""
        return *self._signs(spec), *spec.ladder

    def _signs(self, spec: OperandPlan) -> tuple[Tensor | None, int]:
        """Return the seed of the rotation's signs and the block size; (None, 0) without a rotation."""
        return (None, 0) if spec.rotation is None else (self._drawn.signs(spec.gemm), spec.rotation.block)

    def _rotated(self, spec: OperandPlan, x: Tensor) -> Tensor:
        return x if spec.rotation is None else spec.rotation(x, self._drawn.signs(spec.gemm), spec.operand)

    def _observe(self, spec: OperandPlan, x: Tensor, codes: Quantized) -> None:
        if self.observer is not None:
            self.observer(spec, x, codes)

    def _noise(self, spec: OperandPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return seed and origin of an operand that is rounded stochastically; otherwise (None, None)."""
        if spec.quantizer is None or not spec.quantizer.stochastic:
            return None, None
        draws = self._drawn
        seed, tokens = draws.seed(spec.gemm, spec.operand), spec.token_origin(draws)
        return seed, tokens if self.split is None else self.split.origin(spec.gemm, spec.operand, tokens, seed.device)

    def _shared(self, spec: OperandPlan, amax: Tensor | None = None) -> Shared | None:
        """Return how the scales of a sharded operand are reduced over ranks; None if it is not sharded."""
        return (
            None if spec.cut is None or self.split is None else Shared(dim=spec.cut, group=self.split.group, amax=amax)
        )

    @property
    def _drawn(self) -> SiteDraws:
        if self.draws is None:
            raise ValueError(
                "a stochastic recipe needs draws: call forward(x, draws=...), or attach_draws(model, draws) first"
            )
        return self.draws
