"""The three GEMMs of one linear layer, as its plan says.

    forward     Y  = X W^T, saves X (or codes of it) and, where dgrad takes fprop's codes, those of W
    backward    dX = dY W,  dW = f'(dY^T X)

What is decided is in `precision.plan`; here it is done. Codes live between forward and backward only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowprec_train.numerics import rotated
from lowprec_train.numerics.corrections import Correction
from lowprec_train.numerics.draws import Gemms, Operand, SiteDraws
from lowprec_train.numerics.pairs import both
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule, Shared
from lowprec_train.precision.gemm import Path, accumulate, carrier_of, cast, multiply
from lowprec_train.precision.linear_plan import GemmPlan, LinearPlan, Op, OperandPlan, Source
from lowprec_train.precision.mean_split import mean_product, rank_one, without_mean
from lowprec_train.precision.outliers import Residual
from lowprec_train.precision.saved import SavedOperand, flatten, unflatten
from lowprec_train.precision.split import Split

Observer = Callable[[OperandPlan, Tensor, Quantized], None]
"""Told of every operand that is rounded: its plan, the matrix as the quantiser saw it, what came out."""

Factor = Tensor | None
"""Row scales of one operand that are multiplied into the other, [1, k]."""


@dataclass(frozen=True)
class Means:
    """rest: dY without its mean, FP32. dy, x: means over the tokens, FP32 [n] and [k]; x only where wgrad adds them."""

    rest: Tensor
    dy: Tensor
    x: Tensor | None = None


@dataclass(frozen=True)
class LinearGemms:
    """One layer in one pass: its plan, its draws and who watches. draws: None for a recipe that needs none. split:
    where x, weight and dy are this rank's parts; codes and scales are those of the whole, cut alike.
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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [m, k], weight [n, k] -> (y [m, n] in x's dtype, what `backward` needs besides the weight).

        amax: any tensor whose largest element is max |x|, where the kernel that made x left it. gathered: codes of the
        weight that others made; the weight is then asked for its dtype only, that of dw. weight_amax: of the whole
        weight, where all ranks know it already.
        """
        fprop, w = self.plan.fprop, weight if gathered else cast(weight, x.dtype)
        rest, mean = without_mean(x) if self.plan.splits_x else (x, None)
        codes_x, residual, saved_x = self._input(x, rest, amax)
        codes_w, saved_w = self._weight(w, weight_amax) if gathered is None else (gathered.codes(), gathered)
        saved = flatten(saved_x, saved_w) + ((mean,) if self.plan.saves_mean and mean is not None else ())
        if fprop.codes_only:
            return self._product(fprop, x, w, x.dtype), saved
        a, b = x if codes_x is None else codes_x, w if codes_w is None else codes_w
        row = mean_product(mean, w) if fprop.a.mean_split and mean is not None else None
        if residual is None:
            return self._with_row(fprop, a, b, row, x.dtype), saved
        y = self._with_row(fprop, a, b, row, torch.float32)
        return cast(y + accumulate(residual.dense(x.dtype), w), x.dtype), saved

    def backward(
        self,
        dy: Tensor,
        weight: Tensor,
        saved: tuple[Tensor, ...],
        dtype: torch.dtype,
        needs: tuple[bool, bool],
        amax: Tensor | None = None,
        into: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dy [m, n] -> (dx [m, k] in `dtype`, dw [n, k] in `into` or the weight's dtype), each where it is needed.
        amax: of dy, as in `forward`.
        """
        plan, into = self.plan, into or weight.dtype
        x, w = unflatten(saved, plan.saved_x, plan.saved_w)
        assert x is not None
        x, means = self._means(x, saved, dy) if plan.splits_dy else (x, None)
        by_token, by_channel = (means.rest if means and each.a.mean_split else dy for each in (plan.dgrad, plan.wgrad))
        whole = plan.saved_x.residual or plan.adds_means
        product = torch.float32 if whole else into if plan.straight_through else None
        row = (
            mean_product(means.dy, cast(weight, dtype).t()) if means and plan.dgrad.a.mean_split and needs[0] else None
        )
        dx: Tensor | None = None
        dw: Tensor | None = None
        if all(needs) and plan.dgrad.a.op is Op.QUANTIZE_BOTH:
            (b, across), (b_t, down) = self._weight_t(weight, w, dtype), self._input_t(x, dtype)
            a, a_t = self._both(plan.dgrad.a, plan.wgrad.a.quantizer, by_token, amax, across, down)
            dx, dw = self._with_row(plan.dgrad, a, b, row, dtype), self._product(plan.wgrad, a_t, b_t, product)
        else:
            shared = all(needs) and plan.wgrad.a.source is Source.DGRAD_CODES
            codes = self._rounded(plan.dgrad.a, by_token) if shared else None
            dx = self._dgrad(by_token, codes, weight, w, row, dtype) if needs[0] else None
            dw = self._wgrad(by_channel, codes, x, dtype, product) if needs[1] else None
        if dx is not None and self.split is not None and plan.gathers_rows:
            dx = self.split.group.reduce_scatter(dx)
        return dx, None if dw is None else self._estimated(by_channel, dw, weight, x, w, means, dtype, into)

    # --- forward ---

    def _means(self, x: SavedOperand, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[SavedOperand, Means]:
        """X as wgrad takes it, and what the products are put together with."""
        rest, mean = without_mean(dy)
        if not self.plan.adds_means:
            return x, Means(rest, mean)
        if self.plan.saves_mean:
            return x, Means(rest, mean, saved[-1])
        x_rest, x_mean = without_mean(x.tensors[0])
        return replace(x, tensors=(x_rest,)) if self.plan.wgrad.b.mean_split else x, Means(rest, mean, x_mean)

    def _input(
        self, x: Tensor, rest: Tensor, amax: Tensor | None
    ) -> tuple[Quantized | None, Residual | None, SavedOperand]:
        """Codes of X; what the clamp left over; what backward needs of X. rest: X, or X without its mean."""
        how, form, later = self.plan.fprop.a, self.plan.saved_x, self.plan.wgrad.b
        codes = codes_t = residual = None
        if how.source is Source.ALL_GATHERED:
            codes = self._gathered_rows(how, rest)
        elif how.op is Op.QUANTIZE_OUTLIERS:
            codes, residual = self._clamped(how, rest)
        elif how.op is Op.ROTATE_FOLD:
            codes = self._folded(how, rest)
        elif how.op is Op.QUANTIZE_BOTH:
            codes, codes_t = self._both(how, form.quantizer, rest, amax)
        elif how.quantizer is not None:
            codes = self._rounded(how, rest)
        if form.quantizer is None:
            return codes, residual, SavedOperand(form, (x,))
        if codes_t is None and later.source is Source.FORWARD:
            codes_t = self._rounded(later, rest.t().contiguous())
        elif form.transposed and codes_t is None:
            assert codes is not None
            codes_t = codes.t()
        saved = codes_t if form.transposed else codes
        assert saved is not None
        return codes, residual, SavedOperand.of(form, saved, residual)

    def _gathered_rows(self, how: OperandPlan, x: Tensor) -> Quantized:
        """fprop's codes of all ranks' rows, from this rank's rows of x: a byte an element travels, where BF16 takes
        two, and the bits are those of rounding after the gather.
        """
        assert self.split is not None and how.quantizer is not None
        group, whole = self.split.group, how.quantizer.tile[0] == -1
        if how.op is Op.ROTATE_FOLD:
            mine = self._folded(how, x)
        elif how.outliers is None:
            mine = how.quantizer(x, shared=Shared(dim=0, group=group))
        else:
            mine, _ = how.outliers(x, how.quantizer, None, None)
        assert not mine.parts, "scales of several levels are not gathered"
        scale = mine.scale if whole else group.all_gather(mine.scale)
        return replace(mine, codes=group.all_gather(mine.codes), scale=scale)

    def _weight(self, w: Tensor, amax: Tensor | None) -> tuple[Quantized | None, SavedOperand | None]:
        """Codes of W, where fprop or a later GEMM takes them; what backward needs of them."""
        how, form = self.plan.fprop.b, self.plan.saved_w
        if how.quantizer is None:
            return None, None
        if how.op is Op.QUANTIZE_BOTH:
            assert form is not None
            codes, codes_t = self._both(how, form.quantizer, w, whole_amax=amax)
            return codes, SavedOperand.of(form, codes_t)
        codes = self._folded(how, w) if how.op is Op.ROTATE_FOLD else self._rounded(how, w, amax)
        return codes, None if form is None else SavedOperand.of(form, codes)

    # --- backward ---

    def _weight_t(
        self, weight: Tensor, w: SavedOperand | None, dtype: torch.dtype
    ) -> tuple[Tensor | Quantized, Factor]:
        """W^T [k, n] or its codes, and their row scales where dY takes them."""
        how = self.plan.dgrad.b
        if how.source is Source.FPROP_CODES:
            assert w is not None
            return self._carriers_t(w) if how.folded else _without_scale(w.transposed_codes(), self.plan.dgrad.a)
        coded = w is not None and not w.form.scale_only
        matrix = cast(w.codes().dequantize(dtype), dtype) if w is not None and coded else cast(weight, dtype)
        if how.op is Op.ROTATE_FOLD:
            return self._folded(how, matrix), None
        return self._operand(how, matrix.t().contiguous()), None

    def _carriers_t(self, w: SavedOperand) -> tuple[Quantized, Factor]:
        """Codes of W^T [k, n] with the block scales in them, and the row scales of W, which dY takes."""
        codes = w.codes()
        folded, scale = torch.ops.lowprec.fold(codes.codes, codes.scale, carrier_of(codes.exponent_span))
        if self.split is not None and self.split.dim == 1:  # a row's largest block may lie on another rank
            whole = self.split.group.all_reduce_max(scale)
            folded, scale = torch.ops.lowprec.dequantize(folded, scale / whole).to(folded.dtype), whole
        return Quantized(torch.ops.lowprec.transpose(folded), torch.ones_like(scale[:1])), scale.t()

    def _input_t(self, x: SavedOperand, dtype: torch.dtype) -> tuple[Tensor | Quantized, Factor]:
        """X^T [k, m] or its codes, and their row scales where dY^T takes them."""
        how, plain = self.plan.wgrad.b, x.form.quantizer is None
        if how.source is Source.FORWARD:
            return x.codes(), None
        if how.source is Source.FPROP_CODES:
            return _without_scale(x.transposed_codes(), self.plan.wgrad.a)
        if how.op is Op.ROTATE_FOLD:
            if plain:
                return self._folded(how, x.tensors[0]), None
            codes = x.codes()
            return self._folded(how, codes.codes, codes.scale), None
        matrix = x.tensors[0] if plain else cast(x.codes().dequantize(dtype), dtype)
        return self._operand(how, matrix.t().contiguous()), None

    def _dgrad(
        self,
        dy: Tensor,
        codes: Quantized | None,
        weight: Tensor,
        w: SavedOperand | None,
        row: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        b, factor = self._weight_t(weight, w, dtype)
        a = codes or self._gradient(self.plan.dgrad.a, dy, factor)
        return self._with_row(self.plan.dgrad, a, b, row, dtype)

    def _wgrad(
        self, dy: Tensor, codes: Quantized | None, x: SavedOperand, dtype: torch.dtype, product: torch.dtype | None
    ) -> Tensor:
        wgrad = self.plan.wgrad
        if wgrad.path is Path.BF16 and x.form.quantizer is None:  # the very product that nn.Linear's backward makes
            return cast(dy.t() @ x.tensors[0], product or torch.float32)
        b, factor = self._input_t(x, dtype)
        return self._product(wgrad, codes.t() if codes else self._gradient(wgrad.a, dy, factor), b, product)

    def _gradient(self, how: OperandPlan, dy: Tensor, factor: Factor) -> Tensor | Quantized:
        """dY or dY^T, as its GEMM takes it."""
        if how.op is Op.ROTATE_FOLD:
            return self._folded(how, dy)
        a = dy.t().contiguous() if how.transposed else dy
        return self._operand(how, a if factor is None else a.float() * factor)

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
        """The weight's gradient from the product of wgrad: the residual's and the means' shares, the slope."""
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
        self, how: GemmPlan, a: Tensor | Quantized, b: Tensor | Quantized, dtype: torch.dtype | None
    ) -> Tensor:
        return multiply(a, b, how.path, split_accumulation=how.split_accumulation, dtype=dtype)

    def _with_row(
        self, how: GemmPlan, a: Tensor | Quantized, b: Tensor | Quantized, row: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The product, plus the same row of FP32 numbers for each token where there is one."""
        if row is None:
            return self._product(how, a, b, dtype)
        return cast(self._product(how, a, b, torch.float32) + row, dtype)

    def _operand(self, how: OperandPlan, x: Tensor) -> Tensor | Quantized:
        return x if how.quantizer is None else self._rounded(how, x)

    def _rounded(self, how: OperandPlan, x: Tensor, whole_amax: Tensor | None = None) -> Quantized:
        """x [m, k], rotated and rounded: in one op where there is one and nobody watches. whole_amax: `Shared.amax`."""
        assert how.quantizer is not None
        noise, shared = self._noise(how), self._shared(how, whole_amax)
        signs, block = (None, 0) if how.rotation is None else (self._drawn.signs(how.gemm), how.rotation.block)
        if how.op is Op.ROUND:
            return rotated.values(how.quantizer, x, signs, block, *noise, shared)
        if block and rotated.rotates(how.quantizer, how.cut) and self.observer is None:
            return rotated.of_rotated(how.quantizer, x, signs, block, *noise, shared)
        x = self._rotated(how, x)
        codes = how.quantizer(x, *noise, shared)
        self._observe(how, x, codes)
        return codes

    def _clamped(self, how: OperandPlan, x: Tensor) -> tuple[Quantized, Residual | None]:
        """x, rotated and rounded without its outliers; the outliers."""
        assert how.outliers is not None and how.quantizer is not None
        x, split = self._rotated(how, x), None if how.cut is None else self.split
        codes, residual = how.outliers(x, how.quantizer, *self._noise(how), split)
        self._observe(how, x, codes)
        return codes, residual

    def _both(
        self,
        how: OperandPlan,
        second: Quantizer | None,
        x: Tensor,
        amax: Tensor | None = None,
        across: Factor = None,
        down: Factor = None,
        whole_amax: Tensor | None = None,
    ) -> tuple[Quantized, Quantized]:
        """x, and its transpose by `second`, each multiplied by its factor and rounded, in one op."""
        assert how.quantizer is not None and second is not None
        factors = {"across": across, "down": None if down is None else down.t()}
        produced, shared = how.operand is Operand.A, self._shared(how, whole_amax)
        amax = None if how.mean_split else amax  # which is that of the matrix with its mean
        return both(x, how.quantizer, second, **factors, amax=amax, produced=produced, shared=shared)

    def _folded(self, how: OperandPlan, x: Tensor, scale: Tensor | None = None) -> Quantized:
        """One operand, rotated, rounded and folded. x: as it lies, with `scale` the codes of it."""
        quantizer, rotation = how.quantizer, how.rotation
        assert quantizer is not None
        signs, block = (None, 0) if rotation is None else (self._drawn.signs(how.gemm), rotation.block)
        if quantizer.scale is ScaleRule.LADDER:
            kernel = quantizer.kernel("rotate_fold_ladder", x.device)
            ladder = (quantizer.tile, quantizer.candidates.value, quantizer.exponent_span)
            corrected = quantizer.correction is Correction.ROW
            return Quantized(*kernel(x, scale, how.transposed, signs, block, *ladder, corrected))
        rule = (
            quantizer.scale.value,
            quantizer.range_share,
            quantizer.exponent_span,
            carrier_of(quantizer.exponent_span),
            quantizer.rounding.name,
        )
        kernel = quantizer.kernel("rotate_fold", x.device)
        codes, row = kernel(x, scale, how.transposed, signs, block, *rule, *self._noise(how))
        return Quantized(codes, row, exponent_span=quantizer.exponent_span)

    def _rotated(self, how: OperandPlan, x: Tensor) -> Tensor:
        return x if how.rotation is None else how.rotation(x, self._drawn.signs(how.gemm))

    def _observe(self, how: OperandPlan, x: Tensor, codes: Quantized) -> None:
        if self.observer is not None:
            self.observer(how, x, codes)

    def _noise(self, how: OperandPlan) -> tuple[Tensor | None, Tensor | None]:
        """Seed and origin of a stochastic operand; (None, None) for one that is rounded to nearest."""
        if how.quantizer is None or not how.quantizer.stochastic:
            return None, None
        draws = self._drawn
        seed, tokens = draws.seed(how.gemm, how.operand), _token_origin(how, draws)
        return seed, tokens if self.split is None else self.split.origin(how.gemm, how.operand, tokens, seed.device)

    def _shared(self, how: OperandPlan, amax: Tensor | None = None) -> Shared | None:
        """What an operand's scales take from other ranks; None for an operand that is not cut."""
        return None if how.cut is None or self.split is None else Shared(dim=how.cut, group=self.split.group, amax=amax)

    @property
    def _drawn(self) -> SiteDraws:
        if self.draws is None:
            raise ValueError("a stochastic recipe needs draws: forward(x, draws=...), or attach_draws before it")
        return self.draws


def _token_origin(how: OperandPlan, draws: SiteDraws) -> Tensor | None:
    """Where the operand's tokens lie: rows of X and dY, columns of dY^T and X^T, none in W."""
    if how.gemm is Gemms.WGRAD:
        return draws.token_columns
    return draws.token_rows if how.operand is Operand.A else None


def _without_scale(codes: Quantized, other: OperandPlan) -> tuple[Quantized, Factor]:
    """Codes without the scale [1, k] that the other operand takes."""
    if not other.scaled:
        return codes, None
    return Quantized(codes.codes, torch.ones_like(codes.scale[:, :1])), codes.scale
