"""What each GEMM of a linear layer does, as one value (`precision.plan` makes it).

Six operands: X, W of fprop; dY, W^T of dgrad; dY^T, X^T of wgrad. Each says where it comes from, which op makes it and
what is multiplied into it; each GEMM says its path; X and W say the form in which they wait for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.estimators import Estimator, StraightThrough
from lowprec_train.precision.gemm import Codes, Path
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.saved import SavedForm

NAMES = {
    Gemms.FPROP: {Operand.A: "X", Operand.B: "W"},
    Gemms.DGRAD: {Operand.A: "dY", Operand.B: "W^T"},
    Gemms.WGRAD: {Operand.A: "dY^T", Operand.B: "X^T"},
}


class Source(Enum):
    """Where the operand of a GEMM comes from."""

    PLAIN = "not rounded"
    FRESH = "fresh"
    FORWARD = "rounded in the forward pass"
    FPROP_CODES = "codes of fprop"
    DGRAD_CODES = "codes of dgrad"
    ALL_GATHERED = "all-gathered codes"
    LIBRARY = "rounded by the library"


class Op(Enum):
    """The op that makes it. QUANTIZE_BOTH makes an operand and its transpose; ROTATE_FOLD reads the matrix as it lies
    and writes codes in an FP8 carrier, of the matrix or of its transpose; ROUND writes what codes stand for, in BF16.
    """

    NONE = ""
    QUANTIZE = "quantize"
    QUANTIZE_OUTLIERS = "quantize_outliers"
    QUANTIZE_BOTH = "quantize_both"
    ROTATE_FOLD = "rotate_fold"
    ROUND = "round"


@dataclass(frozen=True, kw_only=True)
class OperandPlan:
    """One operand of one GEMM. quantizer: that its codes were made by; None where it is plain. scaled: the row scales
    of the other operand are multiplied in first. amax_from: the op that makes the matrix and leaves its amax, which
    spares a pass over it. mean_split: its mean over the tokens is taken out first. folded: its block
    scales are in its codes. cut: the dimension along which ranks hold parts of it.
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
    cut: int | None = None

    @property
    def name(self) -> str:
        """X, W, dY or a transpose of one."""
        return NAMES[self.gemm][self.operand]

    @property
    def rounding(self) -> str:
        """Format, tile, scale and outliers: "E2M1[1x*] FP32, OCC 0.99 carrier"; "BF16" for what is not rounded."""
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
        """True for the transpose of a matrix that the layer has: W^T, dY^T, X^T."""
        return self.gemm is Gemms.WGRAD or (self.gemm is Gemms.DGRAD and self.operand is Operand.B)

    def __str__(self) -> str:
        parts = [self.source.value]
        if self.op is Op.QUANTIZE_BOTH:
            both = (self.name.removesuffix("^T"), self.name.removesuffix("^T") + "^T")
            parts.append(f"{self.op.value} ({' and '.join(both)})")
        elif self.op is not Op.NONE:
            parts.append(self.op.value)
        parts += [] if self.rotation is None else [f"rotated {self.rotation.block}"]
        parts += ["folded"] if self.folded else []
        parts += [f"amax from {self.amax_from}"] if self.amax_from else []
        parts += ["less its mean over the tokens"] if self.mean_split else []
        return ", ".join(parts + ["times the row scales of the other operand"] * self.scaled)


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """a[m, k] @ b[n, k]^T. sizes: (m, n, k). codes: of both operands, as the path was chosen by. codes_only: the
    product takes plain operands, and codes are made for the backward pass.
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
    """Of one layer, in one phase of a run, for so many tokens on one kind of device. shape: of the whole weight."""

    shape: tuple[int, int]
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    saved_x: SavedForm
    saved_w: SavedForm | None
    estimator: Estimator

    @property
    def straight_through(self) -> bool:
        """True when wgrad's product is the weight's gradient."""
        return isinstance(self.estimator, StraightThrough)

    @property
    def saves_mean(self) -> bool:
        """True when the mean of X is saved beside codes that no longer have it."""
        return self.adds_means and self.saved_x.quantizer is not None

    @property
    def splits_x(self) -> bool:
        """True when the forward pass takes the mean out of X."""
        later = self.wgrad.b.mean_split and self.wgrad.b.source is Source.FORWARD
        return self.fprop.a.mean_split or later

    @property
    def splits_dy(self) -> bool:
        """True when the backward pass takes the mean out of dY, or needs it."""
        return self.dgrad.a.mean_split or self.adds_means

    @property
    def adds_means(self) -> bool:
        """True when the product of the means of dY and X is added to wgrad's."""
        return self.wgrad.a.mean_split or self.wgrad.b.mean_split

    @property
    def gathers_rows(self) -> bool:
        """True when the layer takes this rank's rows of X and gathers codes of them."""
        return self.fprop.a.source is Source.ALL_GATHERED

    def gemms(self) -> dict[str, GemmPlan]:
        """By name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    def paths(self) -> dict[str, str]:
        """The path of each GEMM, as recipe.json names it."""
        return {name: each.path.value for name, each in self.gemms().items()}

    def peaks(self) -> dict[str, str]:
        """Which of the device's peaks each GEMM is measured against."""
        return {name: each.path.peak for name, each in self.gemms().items()}

    def operands(self) -> Iterator[OperandPlan]:
        """X, W; dY, W^T; dY^T, X^T."""
        return (operand for each in self.gemms().values() for operand in (each.a, each.b))

    def saved(self, operand: OperandPlan) -> SavedForm | None:
        """The form of one of fprop's operands between the passes; None for others, and for W that is not saved."""
        return {"X": self.saved_x, "W": self.saved_w}.get(operand.name)

    def describe(self) -> dict[str, dict[str, str]]:
        """GEMM -> operand -> how it comes about."""
        table: dict[str, dict[str, str]] = {name: {} for name in self.gemms()}
        for operand in self.operands():
            saved = None if operand.source is Source.LIBRARY else self.saved(operand)
            text = str(operand) if saved is None else f"{operand}; saved: {saved}"
            table[operand.gemm.name.lower()][operand.name] = text
        return table
