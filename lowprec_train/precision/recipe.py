"""The recipe of a linear layer, as a value: its three GEMMs, the gradient estimator, and what is saved for backward.

Every GEMM is a[m, k] @ b[n, k]^T. Tiles, rotations and outliers are laid out along the k of that GEMM:

    fprop   Y  = X W^T       a = X   [tokens, in]    b = W   [out, in]
    dgrad   dX = dY W        a = dY  [tokens, out]   b = W^T [in, out]
    wgrad   dW = dY^T X      a = dY^T [out, tokens]  b = X^T [in, tokens]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from lowprec_train.numerics.formats import E2M1, NEAREST, Format, Rounding, parse_format, parse_rounding
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.backend import Backend
from lowprec_train.precision.estimators import DifferentiableEstimator, Estimator, StraightThrough
from lowprec_train.precision.gemm import folds
from lowprec_train.precision.hadamard import RandomHadamard
from lowprec_train.precision.outliers import OutlierClamp


class Reuse(Enum):
    """An operand of a backward GEMM that reuses fprop's codes without a second rounding (docs/numerics.md)."""

    FPROP_CODES = "fprop codes"

    def __str__(self) -> str:
        return self.value


class SavedInput(Enum):
    """What a Linear saves of its input for wgrad.

    INPUT    the BF16 tensor
    CODES    fprop's codes: E2M1 codes two a byte, FOLD3's FP8 carriers one a byte
    PACKED   FOLD3 only: E2M1 codes two a byte and a byte per block scale; the same values as CODES
    OPERAND  wgrad's operand, rotated and quantised in the forward pass; E2M1 two codes a byte
    """

    INPUT = "input"
    CODES = "codes"
    PACKED = "packed"
    OPERAND = "operand"

    @property
    def of_fprop(self) -> bool:
        """True for CODES and PACKED, which save fprop's codes."""
        return self in (SavedInput.CODES, SavedInput.PACKED)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM: the quantisers of its operands (None: BF16), and the options that both operands share.

    split_accumulation: FP8 partial sums are promoted to FP32 at intervals: slower, but exact for FP4 codes.
    codes_only: fprop only. The product runs in BF16, and codes are made for the backward pass only (arXiv 2509.25149,
    appendix D). Raises ValueError for options that exclude each other.
    """

    a: Quantizer | None = None
    b: Quantizer | Reuse | None = None
    rotation: RandomHadamard | None = None
    outliers: OutlierClamp | None = None
    split_accumulation: bool = False
    codes_only: bool = False

    def __post_init__(self) -> None:
        if self.rotation is not None and (self.a is None or not isinstance(self.b, Quantizer)):
            raise ValueError("a rotation needs a quantiser on both operands: reused codes cannot be rotated")
        if self.rotation is not None and self.rotation.half and not self.on_ladder:
            raise ValueError(f"rotation.half belongs to operands with LADDER scales, not to {self.a} x {self.b}")
        if self.outliers is not None and (self.a is None or self.a.format is not E2M1 or self.a.tile != (1, -1)):
            raise ValueError(f"outlier clamping needs row-wise E2M1 activations, not {self.a}")
        if self.rotation is not None and self.outliers is not None and self.outliers.variant == "residual":
            raise ValueError("outliers.variant=residual cannot be used with a rotation: use variant=carrier")
        if (
            self.outliers is not None
            and self.outliers.variant == "carrier"
            and self.a is not None
            and self.a.rounding is not NEAREST
        ):
            raise ValueError(f"outliers.variant=carrier needs rounding to nearest, not {self.a.rounding}")

    @property
    def is_identity(self) -> bool:
        """True when neither operand is quantised."""
        return self.a is None and self.b is None

    @property
    def on_ladder(self) -> bool:
        """True when both operands have LADDER scales."""
        return all(isinstance(q, Quantizer) and q.scale is ScaleRule.LADDER for q in (self.a, self.b))

    def check(self, m: int, n: int, k: int) -> None:
        """Raises ValueError if a tile or the rotation does not divide a dimension."""
        if self.a is not None:
            self.a.check(m, k)
        if isinstance(self.b, Quantizer):
            self.b.check(n, k)
        if self.rotation is not None:
            self.rotation.check(k)

    def __str__(self) -> str:
        codes = f"{self.a or 'BF16'} x {self.b or 'BF16'}"
        parts = [f"BF16 x BF16 (codes for backward: {codes})" if self.codes_only else codes]
        parts += [str(self.rotation)] if self.rotation else []
        parts += [f"OCC {self.outliers.quantile} {self.outliers.variant}"] if self.outliers else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """The precision of one linear layer. The default is the identity: bit-equal to nn.Linear.

    mean_split: subtract the means over the tokens from X and dY before rounding (`precision.mean_split`).
    weight_from_codes: round dgrad's W^T from the dequantised codes of fprop, not from W.
    recompute_weight_codes: where dgrad needs fprop's codes of W, round W once more in the backward pass instead of
    saving them. The codes are the same. Codes that FSDP all-gathers are not saved in either case.
    native_block_scales: use block-scaled tensor cores if they support the format; False uses the paths of GPUs without.
    backend: a library that runs the layer; all other fields must then have their defaults.
    Raises ValueError for a combination that no plan can execute.
    """

    fprop: Gemm = field(default_factory=Gemm)
    dgrad: Gemm = field(default_factory=Gemm)
    wgrad: Gemm = field(default_factory=Gemm)
    estimator: Estimator = field(default_factory=StraightThrough)
    saved_input: SavedInput = SavedInput.INPUT
    mean_split: bool = False
    weight_from_codes: bool = False
    recompute_weight_codes: bool = False
    native_block_scales: bool = True
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if self.backend is not None and replace(self, backend=None) != LinearRecipe():
            raise ValueError(f"a recipe with backend={self.backend} must leave all other fields at their defaults")
        if self.dgrad.b is Reuse.FPROP_CODES and not isinstance(self.fprop.b, Quantizer):
            raise ValueError("dgrad.b reuses fprop's weight codes, but fprop.b has no quantiser")
        if self.wgrad.b is Reuse.FPROP_CODES and self.fprop.a is None:
            raise ValueError("wgrad.b reuses fprop's input codes, but fprop.a has no quantiser")
        if isinstance(self.fprop.b, Reuse) or (self.saved_input.of_fprop and self.fprop.a is None):
            raise ValueError("fprop has no codes to reuse or to save")
        reused = Reuse.FPROP_CODES in (self.dgrad.b, self.wgrad.b) or self.saved_input.of_fprop
        a, b = self.fprop.a, self.wgrad.b
        carriers = a is not None and a.scale is ScaleRule.LADDER and folds(a)
        if self.saved_input is SavedInput.PACKED and (not carriers or b is Reuse.FPROP_CODES):
            raise ValueError(
                f"saved_input=packed needs FOLD3 codes in fprop.a and a quantiser in wgrad.b, not {a} and {b}"
            )
        if self.weight_from_codes and not (isinstance(self.fprop.b, Quantizer) and isinstance(self.dgrad.b, Quantizer)):
            raise ValueError(
                f"weight_from_codes=true needs quantisers in fprop.b and dgrad.b: fprop.b is {self.fprop.b}, dgrad.b "
                f"{self.dgrad.b}"
            )
        if self.recompute_weight_codes and not self.needs_weight_codes:
            raise ValueError(
                f"recompute_weight_codes=true needs a dgrad that uses fprop's codes of W, not {self.dgrad}"
            )
        if self.fprop.rotation is not None and (reused or self.weight_from_codes):
            raise ValueError("fprop's codes are rotated along its own k, so a backward GEMM cannot reuse them")
        for backward, codes in ((self.dgrad, self.fprop.b), (self.wgrad, self.fprop.a)):
            if backward.b is Reuse.FPROP_CODES and isinstance(codes, Quantizer) and codes.outer != (-1, -1):
                raise ValueError(
                    f"no backward GEMM reuses codes of {codes}: their outer scales lie along its reduction"
                )
        if self.saved_input is SavedInput.OPERAND and (not isinstance(self.wgrad.b, Quantizer) or self.wgrad.a is None):
            raise ValueError(f"saved_input=operand needs a quantiser on both operands of wgrad, not {self.wgrad}")
        if self.mean_split and all(gemm.a is None and gemm.b is None for gemm in self.gemms().values()):
            raise ValueError("mean_split=true needs a GEMM with a quantised operand; this recipe has none")
        if self.dgrad.codes_only or self.wgrad.codes_only:
            raise ValueError("codes_only is allowed in fprop only: no GEMM reuses codes of dgrad or wgrad")
        if self.dgrad.outliers is not None or self.wgrad.outliers is not None:
            raise ValueError("outliers are allowed in fprop only, not in dgrad or wgrad")
        if isinstance(self.estimator, DifferentiableEstimator) and (
            not isinstance(self.fprop.b, Quantizer) or self.fprop.b.format is not E2M1
        ):
            raise ValueError(f"the DGE estimator needs E2M1 weights in fprop.b, not {self.fprop.b}")

    @property
    def is_identity(self) -> bool:
        """True when no GEMM is quantised."""
        return self.backend is None and self.fprop.is_identity and self.dgrad.is_identity and self.wgrad.is_identity

    @property
    def takes_values(self) -> bool:
        """True when the layer uses the weight's values directly, and autograd differentiates the product."""
        return self.is_identity or self.backend is not None

    @property
    def draws(self) -> bool:
        """True when a GEMM rounds stochastically or rotates by random signs."""
        operands = [q for gemm in self.gemms().values() for q in (gemm.a, gemm.b)]
        rounds = any(isinstance(q, Quantizer) and q.stochastic for q in operands)
        return rounds or any(gemm.rotation is not None for gemm in self.gemms().values())

    @property
    def saves_codes(self) -> bool:
        """True when wgrad's X comes from fprop's codes."""
        return self.wgrad.b is Reuse.FPROP_CODES or self.saved_input.of_fprop

    @property
    def needs_weight_codes(self) -> bool:
        """True when dgrad reuses fprop's codes of W, or dequantises and rounds them again."""
        return self.dgrad.b is Reuse.FPROP_CODES or self.weight_from_codes

    def gemms(self) -> dict[str, Gemm]:
        """The three GEMMs by name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}


def check(recipe: LinearRecipe, *, name: str, in_features: int, out_features: int, tokens: int) -> None:
    """Raises ValueError if a tile or rotation does not divide a GEMM's dimensions. tokens: of one micro-batch."""
    if recipe.backend is not None:
        recipe.backend.check(name, out_features, in_features, tokens)
    shapes = {
        "fprop": (tokens, out_features, in_features),
        "dgrad": (tokens, in_features, out_features),
        "wgrad": (out_features, in_features, tokens),
    }
    for gemm_name, gemm in recipe.gemms().items():
        try:
            gemm.check(*shapes[gemm_name])
        except ValueError as error:
            raise ValueError(
                f"{name}.{gemm_name} (in {in_features}, out {out_features}, {tokens} tokens): {error}"
            ) from None


def override(recipe: LinearRecipe, changes: Mapping[str, Any]) -> LinearRecipe:
    """The recipe with nested changes, such as {"dgrad": {"a": {"format": "E5M2"}}}.

    Raises ValueError for an unknown field or a value of a wrong type.
    """
    if recipe.backend is not None:
        raise ValueError(f"precision.override={dict(changes)}: use the options of {recipe.backend} instead")
    return _replace(recipe, changes, "override")


DEFAULTS: dict[str, Any] = {
    "rotation": RandomHadamard,
    "outliers": OutlierClamp,
    "a": lambda: Quantizer(E2M1),
    "b": lambda: Quantizer(E2M1),
}


def _replace(value: Any, changes: Mapping[str, Any], path: str) -> Any:
    names = [f.name for f in fields(value)]
    new = {}
    for key, change in changes.items():
        if key not in names:
            raise ValueError(f"{path}.{key}: no such field; {type(value).__name__} has {', '.join(names)}")
        new[key] = _changed(getattr(value, key), change, key, f"{path}.{key}")
    try:
        return replace(value, **new)
    except TypeError as error:
        raise ValueError(f"{path}={dict(changes)}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _changed(old: Any, change: Any, key: str, path: str) -> Any:
    if isinstance(change, Mapping):
        base = old if is_dataclass(old) else DEFAULTS.get(key, lambda: None)()
        if base is None:
            raise ValueError(f"{path} is a single value and has no fields")
        return _replace(base, change, path)
    return _parsed(old, change, key, path)


def _parsed(old: Any, change: Any, key: str, path: str) -> Any:
    if isinstance(old, Format | Rounding):
        try:
            return parse_format(str(change)) if isinstance(old, Format) else parse_rounding(str(change))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if key == "b" and change in (None, "fprop_codes"):
        return None if change is None else Reuse.FPROP_CODES
    if isinstance(old, Enum):
        members = type(old).__members__
        if str(change).upper() not in members:
            raise ValueError(f"{path}: {change!r} is not one of {', '.join(members)}")
        return members[str(change).upper()]
    if key in ("tile", "outer"):
        return _pair(change, path)
    if key == "estimator" and change is None:
        return StraightThrough()
    if isinstance(old, Gemm) or (change is not None and (is_dataclass(old) or key in DEFAULTS)):
        null = "" if isinstance(old, Gemm) else " or null"
        raise ValueError(f"{path}: expected its fields{null}, not {change!r}")
    return _same_type(old, change, path)


def _pair(change: Any, path: str) -> tuple[int, int]:
    """Returns a tile: two whole numbers."""
    numbers = list(change) if isinstance(change, Sequence) and not isinstance(change, str) else []
    if len(numbers) != 2 or any(not isinstance(each, int) or isinstance(each, bool) for each in numbers):
        raise ValueError(f"{path}: expected two whole numbers, such as [1, 16], not {change!r}")
    return numbers[0], numbers[1]


def _same_type(old: Any, change: Any, path: str) -> Any:
    """Returns `change` if it has the type of `old`. Fields that may be None are checked by their dataclass."""
    allowed = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(old))
    if allowed is None or (isinstance(change, allowed) and isinstance(change, bool) == isinstance(old, bool)):
        return change
    raise ValueError(f"{path}: {change!r} is not of type {type(old).__name__}")
