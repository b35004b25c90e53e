"""The plan of a linear layer, which `precision.plan` compiles.

There are six operands: X, W of fprop; dY, W^T of dgrad; dY^T, X^T of wgrad. The plan has the source of each operand,
the op that produces it, the path of each GEMM, and the form in which X and W are saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Correction
from lowprec_train.numerics.draws import Gemms, Operand, SiteDraws
from lowprec_train.numerics.formats import E4M3, NEAREST
from lowprec_train.numerics.quantizer import OWN_OPS, POWERS_OF_TWO, Quantized, Quantizer, ScaleRule
from lowprec_train.precision.estimators import Estimator, StraightThrough
from lowprec_train.precision.gemm import Codes
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.saved import SavedForm

NAMES = {
    Gemms.FPROP: {Operand.A: "X", Operand.B: "W"},
    Gemms.DGRAD: {Operand.A: "dY", Operand.B: "W^T"},
    Gemms.WGRAD: {Operand.A: "dY^T", Operand.B: "X^T"},
}

WITH_CODES_OF_DY = {"gated_silu": "gated_silu_backward_ladder", "rotary": "rotary_backward_ladder"}
"""What reads y, and the ops that compute dY together with its codes of FOLD3."""

WITHOUT_AMAX_OF_DY = ("rotary",)
"""Those that do not compute the amax of dY for other formats."""


class Source(Enum):
    """The origin of a GEMM's operand."""

    PLAIN = "not rounded"
    FRESH = "fresh"
    FORWARD = "rounded in the forward pass"
    FPROP_CODES = "codes of fprop"
    DGRAD_CODES = "codes of dgrad"
    ALL_GATHERED = "all-gathered codes"
    LIBRARY = "rounded by the library"


class Op(Enum):
    """The op that produces an operand.

    QUANTIZE_BOTH writes an operand and its transpose, QUANTIZE_TRANSPOSED the transpose alone. ROTATE_FOLD writes codes
    in an FP8 carrier, of a matrix or of its transpose. ROUND writes the rounded values in BF16.
    """

    NONE = ""
    QUANTIZE = "quantize"
    QUANTIZE_OUTLIERS = "quantize_outliers"
    QUANTIZE_BOTH = "quantize_both"
    QUANTIZE_TRANSPOSED = "quantize_transposed"
    ROTATE_FOLD = "rotate_fold"
    ROUND = "round"


@dataclass(frozen=True, kw_only=True)
class OperandPlan:
    """One operand of one GEMM.

    quantizer: None if the operand is not quantised. scaled: the operand is first multiplied by the row scales of the
    other operand. mean_split: its mean over the tokens is subtracted first. folded: its block scales are multiplied
    into its codes. amax_from: the op that produces the matrix and its amax, which saves a pass over it. codes_from: the
    op that produces the matrix and this operand. cut: the dimension that is sharded over tensor-parallel ranks; None if
    the operand is not sharded.
    """

    gemm: Gemms
    operand: Operand
    source: Source = Source.PLAIN
    quantizer: Quantizer | None = None
    op: Op = Op.NONE
    rotation: RandomHadamard | None = None
    outliers: OutlierClamp | None = None
    scaled: bool = False
    mean_split: bool = False
    folded: bool = False
    amax_from: str = ""
    codes_from: str = ""
    cut: int | None = None

    @property
    def name(self) -> str:
        """Name of the operand: X, W, dY, W^T, dY^T or X^T."""
        return NAMES[self.gemm][self.operand]

    @property
    def rounding(self) -> str:
        """Format, tile, scale and outliers, such as "E2M1[1x*] FP32, OCC 0.99 carrier"; "BF16" if not quantised."""
        parts = [str(self.quantizer or "BF16")]
        parts += (
            [f"span {self.quantizer.exponent_span}"]
            if self.quantizer is not None and self.quantizer.exponent_span
            else []
        )
        parts += [f"OCC {self.outliers.quantile} {self.outliers.variant}"] if self.outliers is not None else []
        return ", ".join(parts)

    @property
    def transposed(self) -> bool:
        """True for W^T, dY^T and X^T."""
        return self.gemm is Gemms.WGRAD or (self.gemm is Gemms.DGRAD and self.operand is Operand.B)

    def scale_apart(self, other: Quantized) -> tuple[Quantized, Tensor | None]:
        """Return codes of the other operand and, if this one is multiplied by their scale [1, k], the scale apart."""
        if not self.scaled:
            return other, None
        return Quantized(other.codes, torch.ones_like(other.scale[:, :1])), other.scale

    def token_origin(self, draws: SiteDraws) -> Tensor | None:
        """Return the global position of the first token: a row of X and dY, a column of dY^T and X^T; None for W."""
        if self.gemm is Gemms.WGRAD:
            return draws.token_columns
        return draws.token_rows if self.operand is Operand.A else None

    @property
    def needs_only_dy(self) -> bool:
        """True if this is dY in codes of FOLD3, which the op that computes dY can also produce."""
        ladder = self.op is Op.ROTATE_FOLD and self.quantizer is not None and self.quantizer.scale is ScaleRule.LADDER
        return ladder and self.name == "dY" and self.cut is None and not self.mean_split

    @property
    def ladder(self) -> tuple[float, tuple[int, int], str, int, bool]:
        """Arguments of `rotate_fold_ladder` for the operand, from `gain` to `corrected`."""
        quantizer = self.quantizer
        assert quantizer is not None
        gain = 1.0 if self.rotation is None else self.rotation.gain(self.operand)
        how = (quantizer.tile, quantizer.candidates.value, quantizer.exponent_span)
        return gain, *how, quantizer.correction is Correction.ROW

    def op_with_amax(self, consumer: str) -> str:
        """Return the op that computes dY together with its amax, if `consumer` reads y; "" if there is none."""
        return "" if consumer in WITHOUT_AMAX_OF_DY else consumer

    def op_with_codes(self, consumer: str) -> str:
        """Return the op that computes dY together with this operand, if `consumer` reads y; "" if there is none."""
        return WITH_CODES_OF_DY.get(consumer, "") if self.needs_only_dy else ""

    @property
    def needs_only_amax(self) -> bool:
        """True if `quantize` is applied to the matrix itself, unsharded, under one scale from its amax."""
        changed = self.rotation is not None or self.mean_split or self.scaled or self.cut is not None
        q = self.quantizer
        one_scale = q is not None and q.tile == (-1, -1) and q.scale not in OWN_OPS
        return self.op is Op.QUANTIZE and one_scale and not changed

    def __str__(self) -> str:
        parts = [self.source.value]
        if self.op is Op.QUANTIZE_BOTH:
            both = (self.name.removesuffix("^T"), self.name.removesuffix("^T") + "^T")
            parts.append(f"{self.op.value} ({' and '.join(both)})")
        elif self.op is not Op.NONE:
            parts.append(self.op.value)
        parts += [] if self.rotation is None else [f"rotated {self.rotation.block}"]
        parts += ["folded"] if self.folded else []
        parts += [f"{what} from {op}" for what, op in (("amax", self.amax_from), ("codes", self.codes_from)) if op]
        parts += ["less its mean over the tokens"] if self.mean_split else []
        return ", ".join(parts + ["times the row scales of the other operand"] * self.scaled)


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """a[m, k] @ b[n, k]^T. sizes: (m, n, k). codes: properties of both operands that determined the path.

    codes_only: the product uses the unquantised operands; codes are made for the backward pass only.
    """

    sizes: tuple[int, int, int]
    a: OperandPlan
    b: OperandPlan
    codes: tuple[Codes, Codes]
    path: Path
    split_accumulation: bool
    codes_only: bool


@dataclass(frozen=True, kw_only=True)
class LinearPlan:
    """The plan of one layer for one recipe, number of tokens and kind of device. shape: of the unsharded weight.
    recomputes_w: the backward pass rounds W again, where dgrad needs fprop's codes of it. keeps_x, keeps_w: what is
    saved of X and of W is saved in a recomputed block, too (`Linear`). compiled_x: as there.
    """

    shape: tuple[int, int]
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    saved_x: SavedForm
    saved_w: SavedForm | None
    estimator: Estimator
    recomputes_w: bool = False
    keeps_x: bool = False
    keeps_w: bool = False
    compiled_x: bool = True

    @property
    def straight_through(self) -> bool:
        """True if wgrad's product is the weight's gradient."""
        return isinstance(self.estimator, StraightThrough)

    @property
    def saves_mean(self) -> bool:
        """True if the mean of X is saved beside the codes of X minus its mean."""
        return self.adds_means and self.saved_x.quantizer is not None

    @property
    def needs_x_mean(self) -> bool:
        """True if the forward pass subtracts the mean from X."""
        later = self.wgrad.b.mean_split and self.wgrad.b.source is Source.FORWARD
        return self.fprop.a.mean_split or later

    @property
    def needs_dy_mean(self) -> bool:
        """True if the backward pass computes the mean of dY."""
        return self.dgrad.a.mean_split or self.adds_means

    @property
    def adds_means(self) -> bool:
        """True if the product of the means of dY and X is added to wgrad's product."""
        return self.wgrad.a.mean_split or self.wgrad.b.mean_split

    @property
    def gathers_rows(self) -> bool:
        """True if the layer quantises this rank's rows of X and all-gathers the codes."""
        return self.fprop.a.source is Source.ALL_GATHERED

    @property
    def gathers_dy(self) -> bool:
        """True if the layer quantises this rank's rows of dY and all-gathers the codes."""
        return self.dgrad.a.source is Source.ALL_GATHERED

    def compiles(self, operand: OperandPlan) -> bool:
        """Return whether, in a compiled graph, the kernel that makes the operand's matrix may be compiled too."""
        return operand.operand is Operand.A and (self.compiled_x or operand.name != "X")

    def rounding_x_again(self, from_norm: bool = False, costly: bool = False) -> LinearPlan:
        """Return the plan for an X that the op before saves for its own backward pass: instead of codes it saves X,
        which takes no memory of its own, if the backward pass can round it again. from_norm: X is the result of an
        RMSNorm, which saves its input; that is saved, and normalised again too.

        Codes of E4M3 under a power of two are rounded again by wgrad's op for FOLD3, or by an op that writes those of
        the transpose, which take hardly any time. Codes of FOLD3 are rounded again only if `costly`.
        """
        x, x_t, q, form = self.fprop.a, self.wgrad.b, self.saved_x.quantizer, self.saved_x
        changed = x.source is not Source.FRESH or x.cut is not None or x.mean_split or self.saves_mean
        if q is None or q != x.quantizer or changed:
            return self
        one_scale = q.format is E4M3 and q.rounding is NEAREST and q.tile == (-1, -1) and q.scale in POWERS_OF_TWO
        ladder = x_t.quantizer is not None and x_t.quantizer.scale is ScaleRule.LADDER and x_t.op is Op.ROTATE_FOLD
        both = one_scale and x.op is Op.QUANTIZE_BOTH and form.transposed and x_t.source is Source.FPROP_CODES
        folded = ladder and x.op is Op.ROTATE_FOLD and q.scale is ScaleRule.LADDER and form.folded and not form.packed
        free = both or (ladder and one_scale and form.plain_codes and x.needs_only_amax)
        if not (free or (costly and folded)):
            return self
        fprop, wgrad = self.fprop, self.wgrad
        if both:
            fprop = replace(fprop, a=replace(x, op=Op.QUANTIZE))
            wgrad = replace(wgrad, b=replace(x_t, source=Source.FRESH, op=Op.QUANTIZE_TRANSPOSED))
        form = replace(form, rounded_again=True, from_norm=from_norm)
        return replace(self, fprop=fprop, wgrad=wgrad, saved_x=form)

    def gemms(self) -> dict[str, GemmPlan]:
        """Return the three GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    def paths(self) -> dict[str, str]:
        """Return the name of each GEMM's path, as in recipe.json."""
        return {name: each.path.value for name, each in self.gemms().items()}

    def peaks(self) -> dict[str, str]:
        """Return the device peak that bounds each GEMM: "bf16", "fp8", "fp4" or "int8"."""
        return {name: each.path.peak for name, each in self.gemms().items()}

    def operands(self) -> Iterator[OperandPlan]:
        """Return the six operands: X, W; dY, W^T; dY^T, X^T."""
        return (operand for each in self.gemms().values() for operand in (each.a, each.b))

    def saved(self, operand: OperandPlan) -> SavedForm | None:
        """Return the form in which an operand of fprop is saved; None for other operands, and if W is not saved."""
        return {"X": self.saved_x, "W": self.saved_w}.get(operand.name)

    def describe(self) -> dict[str, dict[str, str]]:
        """Return GEMM -> operand -> text that describes how the operand is produced."""
        table: dict[str, dict[str, str]] = {name: {} for name in self.gemms()}
        for operand in self.operands():
            saved = None if operand.source is Source.LIBRARY else self.saved(operand)
            text = str(operand) if saved is None else f"{operand}; saved: {saved}"
            text += "; rounded again for dgrad" * (self.recomputes_w and operand.name == "W")
            table[operand.gemm.name.lower()][operand.name] = text
        return table


def library_plan(path: Path, shape: tuple[int, int], tokens: int) -> LinearPlan:
    """Return the plan of a layer that another library computes: sizes and paths only. shape: [n, k]."""
    (n, k), plain = shape, Codes(None)
    sizes = {Gemms.FPROP: (tokens, n, k), Gemms.DGRAD: (tokens, k, n), Gemms.WGRAD: (n, k, tokens)}
    gemms = {
        which: GemmPlan(
            sizes=each,
            a=OperandPlan(gemm=which, operand=Operand.A, source=Source.LIBRARY),
            b=OperandPlan(gemm=which, operand=Operand.B, source=Source.LIBRARY),
            codes=(plain, plain),
            path=path,
            split_accumulation=False,
            codes_only=False,
        )
        for which, each in sizes.items()
    }
    fprop, dgrad, wgrad = gemms.values()
    saved_x, estimator = SavedForm(), StraightThrough()
    return LinearPlan(
        shape=shape, fprop=fprop, dgrad=dgrad, wgrad=wgrad, saved_x=saved_x, saved_w=None, estimator=estimator
    )
