"""Compile a recipe into the plan of a linear layer: its ops and GEMM paths.

    plan = compile_plan(recipe, (n, k), tokens, device, split=split, fused=True)

`precision.linear_gemms` executes a plan; the start-up table, the linter, the memory estimate and telemetry read it.

Row scales of W or X lie along the reduction of a backward GEMM, so they cannot be applied after it. They are multiplied
into dY before dY is quantised (docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.pairs import pairs
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.numerics.rotated import makes_values
from lowprec_train.precision import gemm
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.gemm import Capability, Codes
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear_plan import GemmPlan, LinearPlan, Op, OperandPlan, Source, library_plan
from lowprec_train.precision.recipe import Gemm, LinearRecipe, Reuse, SavedInput
from lowprec_train.precision.saved import SavedForm
from lowprec_train.precision.split import Split


def compile_plan(
    recipe: LinearRecipe,
    shape: tuple[int, int],
    tokens: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    split: Split | None = None,
    fused: bool = True,
    gathered: bool = False,
    producer: str = "",
    consumer: str = "",
    capability: Capability = None,
) -> LinearPlan:
    """Return the plan of a layer.

    shape: [n, k] of the weight or of this rank's shard. tokens: rows of X in the GEMMs. dtype: of X. split: the
    tensor-parallel split, if any. fused: False produces every operand by a separate op, which an observer requires.
    gathered: FSDP all-gathers the weight as fprop's codes; the rank of each shard then applies the estimator. producer,
    consumer: what makes X and reads y, and may provide the amax of X, and the amax or codes of dY. capability: compute
    capability to plan for; None: that of `device`.
    """
    if recipe.backend is not None:
        return library_plan(recipe.backend.path, shape, tokens)
    cores = capability or gemm.capability_of(device)
    arguments = _Compiler(recipe, *shape, tokens, cores, dtype, split, fused, gathered, producer, consumer)
    return arguments.plan()


@dataclass(frozen=True)
class _Compiler:
    """The arguments of `compile_plan`; each method makes one decision."""

    recipe: LinearRecipe
    n: int
    k: int
    tokens: int
    capability: Capability
    dtype: torch.dtype
    split: Split | None
    fused: bool
    gathered: bool
    producer: str
    consumer: str

    def plan(self) -> LinearPlan:
        x, w = self.x(), self.w()
        saved_x = self.saved_x(x)
        (dy, w_t), (dy_t, x_t) = self.dgrad(), self.wgrad(x, saved_x)
        if self.gathers_dy(dy, dy_t, saved_x):
            dy, dy_t = replace(dy, source=Source.ALL_GATHERED), replace(dy_t, source=Source.DGRAD_CODES)
        elif self.pairs_dy(dy, dy_t):
            dy, dy_t = replace(dy, op=Op.QUANTIZE_BOTH), replace(dy_t, op=Op.QUANTIZE_BOTH)
        elif self.shares_dy(dy, dy_t):
            dy_t = replace(dy_t, source=Source.DGRAD_CODES)
        x, dy, dy_t, x_t = self.without_means(x, dy, dy_t, x_t)
        dim = None if self.split is None else self.split.dim
        changed = dy.scaled or dy_t.scaled or self.recipe.mean_split
        pair_of_x = x.op is Op.QUANTIZE_BOTH and _whole(x.quantizer, saved_x.quantizer) and not x.mean_split
        if dim != 0 and (pair_of_x or x.needs_only_amax):
            x = replace(x, amax_from=self.producer)
        if dim != 1 and dy.op is Op.QUANTIZE_BOTH and _whole(dy.quantizer, dy_t.quantizer) and not changed:
            dy = replace(dy, amax_from=dy.op_with_amax(self.consumer))
        if self.dtype.itemsize == 2:
            dy = replace(dy, codes_from=dy.op_with_codes(self.consumer))
        return LinearPlan(
            shape=self.whole_shape,
            fprop=self.gemm(self.recipe.fprop, x, w),
            dgrad=self.gemm(self.recipe.dgrad, dy, w_t),
            wgrad=self.gemm(self.recipe.wgrad, dy_t, x_t),
            saved_x=saved_x,
            saved_w=self.saved_w(w),
            recomputes_w=self.recomputes_w,
            estimator=StraightThrough() if self.gathered else self.recipe.estimator,
        )

    @property
    def whole_shape(self) -> tuple[int, int]:
        if self.split is None:
            return self.n, self.k
        return (self.split.whole, self.k) if self.split.dim == 0 else (self.n, self.split.whole)

    def without_means(self, *operands: OperandPlan) -> tuple[OperandPlan, ...]:
        """Set `mean_split` for operands that are quantised, and for X^T if it comes from fprop's codes."""
        if not self.recipe.mean_split:
            return operands

        def rounded(of: OperandPlan) -> bool:
            return of.quantizer is not None or (of.name == "X^T" and self.recipe.saves_codes)

        return tuple(replace(each, mean_split=rounded(each)) for each in operands)

    def operand(self, which: Gemms, operand: Operand, **how) -> OperandPlan:  # type: ignore[no-untyped-def]
        cut = None if self.split is None else self.split.cut(which, operand)
        rotation = self.recipe.gemms()[which.name.lower()].rotation if "quantizer" in how else None
        return OperandPlan(gemm=which, operand=operand, cut=cut, rotation=rotation, **how)

    def sizes(self, which: Gemms) -> tuple[int, int, int]:
        """Return (m, n, k) of a GEMM."""
        if which is Gemms.WGRAD:
            return self.n, self.k, self.tokens
        return (self.tokens, self.n, self.k) if which is Gemms.FPROP else (self.tokens, self.k, self.n)

    def gemm(self, how: Gemm, a: OperandPlan, b: OperandPlan) -> GemmPlan:
        m, n, k = sizes = self.sizes(a.gemm)
        codes_a = self.codes(a, m, k)
        codes_b = Codes(b.quantizer.format.carrier) if a.scaled and b.quantizer else self.codes(b, n, k)
        native = self.recipe.native_block_scales
        found = gemm.choose(codes_a, codes_b, n, k, self.capability, m=m, native=native)
        path = Path.BF16 if how.codes_only else found
        return GemmPlan(
            sizes=sizes,
            a=self.as_values(a, path),
            b=self.as_values(b, path),
            codes=(codes_a, codes_b),
            path=path,
            split_accumulation=how.split_accumulation,
            codes_only=how.codes_only,
        )

    def as_values(self, operand: OperandPlan, path: Path) -> OperandPlan:
        """Change the operand to rounded BF16 values if this GEMM would only dequantise its codes."""
        quantizer, fprop = operand.quantizer, operand.gemm is Gemms.FPROP
        saved = fprop and (operand.operand is Operand.B or self.recipe.saves_codes)
        single_use = operand.source is Source.FRESH and operand.op is Op.QUANTIZE and self.fused and not saved
        decoded = path is Path.DEQUANTIZE and single_use
        if not decoded or quantizer is None or not makes_values(quantizer, operand.cut):
            return operand
        return replace(operand, op=Op.ROUND, amax_from="")

    def codes(self, operand: OperandPlan, rows: int, columns: int) -> Codes:
        """Return the properties of an operand that decide the path."""
        quantizer = operand.quantizer
        if quantizer is None:
            return Codes(None)
        if operand.source is Source.FPROP_CODES:
            return gemm.codes_of(quantizer.transposed(), rows, columns, exponent_span=0)
        in_carrier = operand.outliers is not None and operand.outliers.variant == "carrier"
        return gemm.codes_of(quantizer, rows, columns, exponent_span=0 if in_carrier else quantizer.exponent_span)

    # --- fprop, and what it saves ---

    def x(self) -> OperandPlan:
        fprop, a = self.recipe.fprop, self.recipe.fprop.a
        if a is None or (fprop.codes_only and not self.recipe.saves_codes):
            return self.operand(Gemms.FPROP, Operand.A)
        source = Source.ALL_GATHERED if self.gathers_rows(a) else Source.FRESH
        op = Op.QUANTIZE if fprop.outliers is None else Op.QUANTIZE_OUTLIERS
        if source is Source.FRESH and op is Op.QUANTIZE and self.pairs_x(a):
            op = Op.QUANTIZE_BOTH
        if op is Op.QUANTIZE and self.recipe.wgrad.b is not Reuse.FPROP_CODES and self.folds_ladder(Operand.A, a):
            op = Op.ROTATE_FOLD
        return self.operand(
            Gemms.FPROP, Operand.A, source=source, quantizer=a, op=op, outliers=self.recipe.fprop.outliers
        )

    def gathers_rows(self, a: Quantizer) -> bool:
        """Return whether the all-gather of X can send fprop's codes instead of BF16 values.

        The codes must be one byte each, suffice for all GEMMs, and be computable row by row, except for a per-tensor
        scale. An observer needs the whole X, so it disables this.
        """
        fprop = self.recipe.fprop
        if (
            not self.fused
            or self.split is None
            or self.split.dim != 0
            or fprop.codes_only
            or fprop.rotation is not None
            or self.recipe.mean_split  # the mean is over all ranks' rows
        ):
            return False
        by_rows = a.tile == (-1, -1) or a.tile[0] == 1
        small = a.format.carrier.itemsize == 1 and not a.stochastic and a.scale is not ScaleRule.NVFP4
        carried = fprop.outliers is None or fprop.outliers.variant == "carrier"
        folded = self.recipe.wgrad.b is not Reuse.FPROP_CODES and self.folds_ladder(Operand.A, a)
        rowed = a.scale is not ScaleRule.LADDER or folded  # else block scales, which cannot be gathered
        return self.recipe.saves_codes and by_rows and small and carried and rowed

    def pairs_x(self, a: Quantizer) -> bool:
        """Return whether one op quantises X for fprop and X^T for wgrad. Reused E2M1 codes are packed instead."""
        recipe = self.recipe
        if recipe.fprop.rotation is not None:
            return False
        if recipe.wgrad.b is Reuse.FPROP_CODES:
            return a.format is not E2M1 and self.pairs(Gemms.FPROP, Operand.A, a, a.transposed())
        second = recipe.wgrad.b if recipe.saved_input is SavedInput.OPERAND and recipe.wgrad.rotation is None else None
        return second is not None and self.pairs(Gemms.FPROP, Operand.A, a, second)

    def saved_x(self, x: OperandPlan) -> SavedForm:
        recipe, a = self.recipe, self.recipe.fprop.a
        if recipe.saved_input is SavedInput.OPERAND:
            assert isinstance(recipe.wgrad.b, Quantizer)
            if recipe.wgrad.on_ladder and self.folds(Gemms.WGRAD, recipe.wgrad):
                return SavedForm(quantizer=recipe.wgrad.b, transposed=True, folded=True, packed=True)
            packed = recipe.wgrad.b.format is E2M1 and x.op is not Op.QUANTIZE_BOTH and self.tokens % 2 == 0
            return SavedForm(quantizer=recipe.wgrad.b, transposed=True, packed=packed)
        if not recipe.saves_codes:
            return SavedForm()
        assert a is not None
        if x.op is Op.ROTATE_FOLD:
            return SavedForm(quantizer=a, folded=True, packed=recipe.saved_input is SavedInput.PACKED)
        clamp = recipe.fprop.outliers
        packed = a.format is E2M1 and (clamp is None or clamp.variant != "carrier")
        if recipe.wgrad.b is Reuse.FPROP_CODES and not packed:
            return SavedForm(quantizer=_transposed(a), transposed=True)
        residual = clamp is not None and clamp.variant == "residual"
        return SavedForm(quantizer=a, packed=packed and self.k % 2 == 0, residual=residual)

    def w(self) -> OperandPlan:
        fprop, b = self.recipe.fprop, self.recipe.fprop.b
        used = (
            not fprop.codes_only
            or self.recipe.needs_weight_codes
            or not isinstance(self.recipe.estimator, StraightThrough)
        )
        if not isinstance(b, Quantizer) or not used:
            return self.operand(Gemms.FPROP, Operand.B)
        source = Source.ALL_GATHERED if self.gathered else Source.FRESH
        reused = self.recipe.dgrad.b is Reuse.FPROP_CODES and not self.recomputes_w
        pair = reused and self.pairs(Gemms.FPROP, Operand.B, b, b.transposed())
        op = Op.NONE if self.gathered else Op.QUANTIZE_BOTH if pair else Op.QUANTIZE
        if op is Op.QUANTIZE and not self.recipe.needs_weight_codes and self.folds_ladder(Operand.B, b):
            op = Op.ROTATE_FOLD
        return self.operand(Gemms.FPROP, Operand.B, source=source, quantizer=b, op=op)

    @property
    def recomputes_w(self) -> bool:
        return self.recipe.recompute_weight_codes and not self.gathered

    def saved_w(self, w: OperandPlan) -> SavedForm | None:
        if w.quantizer is None or self.recomputes_w or not self.recipe.needs_weight_codes:
            estimated = w.quantizer is not None and not isinstance(self.recipe.estimator, StraightThrough)
            return SavedForm(quantizer=w.quantizer, scale_only=True) if estimated else None
        if w.op is Op.QUANTIZE_BOTH:
            return SavedForm(quantizer=_transposed(w.quantizer), transposed=True)
        packed = w.quantizer.format is E2M1 and w.op is Op.QUANTIZE and self.k % 2 == 0
        return SavedForm(quantizer=w.quantizer, packed=packed)

    # --- the backward GEMMs ---

    def dgrad(self) -> tuple[OperandPlan, OperandPlan]:
        how, w = self.recipe.dgrad, self.recipe.fprop.b
        if self.folds(Gemms.DGRAD, how):
            return self.fresh(Gemms.DGRAD, how, Op.ROTATE_FOLD)
        a, b = self.fresh(Gemms.DGRAD, how)
        if not isinstance(how.b, Reuse):
            return a, b
        assert isinstance(w, Quantizer)
        folded = gemm.reused_folded(w)
        a = replace(a, scaled=folded or gemm.row_scales(w, self.n, self.k))
        return a, replace(b, source=Source.FPROP_CODES, quantizer=w, folded=folded)

    def wgrad(self, fprop_x: OperandPlan, saved_x: SavedForm) -> tuple[OperandPlan, OperandPlan]:
        how, x = self.recipe.wgrad, self.recipe.fprop.a
        operand = self.recipe.saved_input is SavedInput.OPERAND
        folds = saved_x.folded if operand else self.folds(Gemms.WGRAD, how) and self.decodes(saved_x)
        a, b = self.fresh(Gemms.WGRAD, how, Op.ROTATE_FOLD if folds else Op.QUANTIZE)
        if operand:
            return a, replace(b, source=Source.FORWARD, op=fprop_x.op if fprop_x.op is Op.QUANTIZE_BOTH else b.op)
        if folds or not isinstance(how.b, Reuse):
            return a, b
        assert x is not None
        return replace(a, scaled=gemm.row_scales(x, self.tokens, self.k)), replace(
            b, source=Source.FPROP_CODES, quantizer=x
        )

    def fresh(self, which: Gemms, how: Gemm, op: Op = Op.QUANTIZE) -> tuple[OperandPlan, OperandPlan]:
        """Return both operands; those with a quantiser are quantised for this GEMM only."""

        def of(operand: Operand, quantizer: Quantizer | Reuse | None) -> OperandPlan:
            if not isinstance(quantizer, Quantizer):
                return self.operand(which, operand)
            return self.operand(which, operand, source=Source.FRESH, quantizer=quantizer, op=op)

        return of(Operand.A, how.a), of(Operand.B, how.b)

    def folds(self, which: Gemms, how: Gemm) -> bool:
        """Return whether one op per operand turns values into folded FP8 carriers."""
        operands = ((Operand.A, how.a), (Operand.B, how.b))
        foldable = self.fused and all(
            isinstance(q, Quantizer) and gemm.folds(q) and not self.crosses(which, operand, q)
            for operand, q in operands
        )
        return foldable and self.rotates_inside(how) and not self.is_native(which, how)

    def rotates_inside(self, how: Gemm) -> bool:
        """Return whether the op that folds an operand rotates it first: LADDER's does so in half precision only."""
        return how.rotation is None or how.rotation.half == how.on_ladder

    def is_native(self, which: Gemms, how: Gemm) -> bool:
        """Return whether tensor cores apply the block scales of both operands; these are then not folded."""
        _, n, k = self.sizes(which)
        a, b = (gemm.block_format(q) if isinstance(q, Quantizer) else "" for q in (how.a, how.b))
        return self.recipe.native_block_scales and gemm.is_native(a, b, n, k, self.capability)

    def folds_ladder(self, operand: Operand, quantizer: Quantizer) -> bool:
        """Return whether the op that quantises for fprop also folds: no backward GEMM may need the unfolded codes."""
        ladder = quantizer.scale is ScaleRule.LADDER and isinstance(self.recipe.estimator, StraightThrough)
        whole = not self.crosses(Gemms.FPROP, operand, quantizer) and self.recipe.fprop.outliers is None
        return self.fused and ladder and whole and gemm.folds(quantizer) and self.rotates_inside(self.recipe.fprop)

    def decodes(self, saved_x: SavedForm) -> bool:
        """Return whether the folding op can read the saved X: values or unpacked codes, one scale (ladder: per row)."""
        x, b = saved_x.quantizer, self.recipe.wgrad.b
        if x is None:
            return True
        if x.scale is ScaleRule.LADDER:
            folded = saved_x.folded and self.dtype == torch.bfloat16
            return folded and isinstance(b, Quantizer) and b.scale is ScaleRule.LADDER
        one = not saved_x.two_level and gemm.one_scale(x, self.tokens, self.k)
        return one and not (saved_x.transposed or saved_x.packed) and self.dtype == torch.bfloat16

    def pairs_dy(self, a: OperandPlan, a_t: OperandPlan) -> bool:
        """Return whether one op quantises dY for dgrad and dY^T for wgrad."""
        folded, rotated = a.scaled or a_t.scaled, self.rotates_dy
        if rotated or a.quantizer is None or a_t.quantizer is None:
            return False
        return self.pairs(a.gemm, a.operand, a.quantizer, a_t.quantizer, folded=folded)

    def shares_dy(self, a: OperandPlan, a_t: OperandPlan) -> bool:
        """Return whether dgrad and wgrad share codes of dY: per-tensor, deterministic, no rotation or row scales."""
        q, changed = a.quantizer, a.scaled or a_t.scaled or self.rotates_dy
        return q is not None and q == a_t.quantizer and q.tile == (-1, -1) and not q.stochastic and not changed

    def gathers_dy(self, dy: OperandPlan, dy_t: OperandPlan, saved_x: SavedForm) -> bool:
        """Return whether a row-parallel layer's all-gather of dY can send codes instead of BF16 values.

        dgrad and wgrad must share them, and nothing else may need dY. An observer needs the whole dY, so it disables
        this.
        """
        if not self.fused or self.split is None or self.split.dim != 1 or not self.shares_dy(dy, dy_t):
            return False
        more = saved_x.residual or self.recipe.mean_split  # dY itself is multiplied with outliers or means of X
        return dy.quantizer is not None and dy.quantizer.format.carrier.itemsize == 1 and not more

    @property
    def rotates_dy(self) -> bool:
        return self.recipe.dgrad.rotation is not None or self.recipe.wgrad.rotation is not None

    # --- one op for two operands ---

    def pairs(
        self, which: Gemms, operand: Operand, first: Quantizer, second: Quantizer, *, folded: bool = False
    ) -> bool:
        """Return whether one op can quantise an operand by `first` and its transpose by `second`.

        Scales must not depend on other ranks' shards unless both are per-tensor. folded: row scales are multiplied in.
        """
        if not self.fused or not pairs(first, second):
            return False
        crossing = self.crosses(which, operand, first) or self.crosses(which, operand, second, transposed=True)
        return not crossing or (_whole(first, second) and not folded)

    def crosses(self, which: Gemms, operand: Operand, quantizer: Quantizer, *, transposed: bool = False) -> bool:
        """Return whether a scale of the operand depends on other ranks' shards."""
        cut = None if self.split is None else self.split.cut(which, operand)
        return cut is not None and quantizer.crosses(1 - cut if transposed else cut)


def _whole(*quantizers: Quantizer | None) -> bool:
    return all(quantizer is not None and quantizer.tile == (-1, -1) for quantizer in quantizers)


def _transposed(quantizer: Quantizer) -> Quantizer:
    """Return the quantiser of transposed codes, without exponent_span, which bounds the original rows."""
    return replace(quantizer.transposed(), exponent_span=0) if quantizer.exponent_span else quantizer.transposed()
