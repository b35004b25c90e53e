"""A recipe is a value: three GEMMs, the weight's gradient estimator, and what is saved for the backward pass.

Every GEMM is a[m, k] @ b[n, k]^T, and tiles, rotations and outliers lie along its own k:

    fprop   Y  = X W^T       a = X   [tokens, in]    b = W   [out, in]
    dgrad   dX = dY W        a = dY  [tokens, out]   b = W^T [in, out]
    wgrad   dW = dY^T X      a = dY^T [out, tokens]  b = X^T [in, tokens]
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """An operand of a backward GEMM that takes fprop's codes as they are: no second rounding (docs/numerics.md)."""

    FPROP_CODES = "fprop codes"

    def __str__(self) -> str:
        return self.value


class SavedInput(Enum):
    """What a Linear saves of its input for wgrad: the BF16 tensor, fprop's codes, or wgrad's own operand, rotated and
    rounded in the forward pass. E2M1 codes are packed, two a byte; carriers of FOLD3 are a byte each as CODES, and E2M1
    codes with a byte for the scale of each block, the same numbers, as PACKED.
    """

    INPUT = "input"
    CODES = "codes"
    PACKED = "packed"
    OPERAND = "operand"

    @property
    def of_fprop(self) -> bool:
        """fprop's codes are saved."""
        return self in (SavedInput.CODES, SavedInput.PACKED)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Operand quantisers (None: BF16) and what must match across the pair, so that a mismatch cannot be written down.

    split_accumulation: FP8 partial sums are promoted to FP32 as they go (slower, exact for FP4 codes) instead of at the
    end.
    codes_only: of fprop; the product takes its operands as they are, and codes are made only where the backward pass
    takes them (a forward pass in BF16 before an unchanged backward pass, arXiv 2509.25149, appendix D).
    """

    a: Quantizer | None = None
    b: Quantizer | Reuse | None = None
    rotation: RandomHadamard | None = None
    outliers: OutlierClamp | None = None
    split_accumulation: bool = False
    codes_only: bool = False

    def __post_init__(self) -> None:
        if self.rotation is not None and (self.a is None or not isinstance(self.b, Quantizer)):
            raise ValueError(
                "a rotation needs a quantiser on both operands: codes that exist already cannot be rotated"
            )
        if self.outliers is not None and (self.a is None or self.a.format is not E2M1 or self.a.tile != (1, -1)):
            raise ValueError(f"outlier clamping belongs to row-wise E2M1 activations, not to {self.a}")
        if self.rotation is not None and self.outliers is not None and self.outliers.variant == "residual":
            raise ValueError("a residual of rotated activations cannot multiply the weight as it is; take the carrier")
        if (
            self.outliers is not None
            and self.outliers.variant == "carrier"
            and self.a is not None
            and self.a.rounding is not NEAREST
        ):
            raise ValueError(f"carrier outliers are rounded to nearest; a {self.a.rounding} quantiser cannot hold them")

    @property
    def is_identity(self) -> bool:
        """True when both operands stay as they are."""
        return self.a is None and self.b is None

    def check(self, m: int, n: int, k: int) -> None:
        """ValueError when a tile or the rotation does not divide a dimension."""
        if self.a is not None:
            self.a.check(m, k)
        if isinstance(self.b, Quantizer):
            self.b.check(n, k)
        if self.rotation is not None:
            self.rotation.check(k)

    def __str__(self) -> str:
        codes = f"{self.a or 'BF16'} x {self.b or 'BF16'}"
        parts = [f"BF16 x BF16 (codes for backward: {codes})" if self.codes_only else codes]
        parts += [f"RHT {self.rotation.block}"] if self.rotation else []
        parts += [f"OCC {self.outliers.quantile} {self.outliers.variant}"] if self.outliers else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """The precision of one linear layer. The default is the identity: bit-equal to nn.Linear.

    mean_split: X and dY lose their means over the tokens before they are rounded (`precision.mean_split`).
    weight_from_codes: dgrad's W^T is rounded from what fprop's codes of W stand for, as wgrad's X^T is where
    saved_input is CODES; False rounds it from W.
    native_block_scales: block-scaled tensor cores multiply codes and scales whose format they know; False multiplies
    them as GPUs without these do.
    backend: a library that runs the layer; the other fields then stay as they are by default, and say nothing.
    """

    fprop: Gemm = field(default_factory=Gemm)
    dgrad: Gemm = field(default_factory=Gemm)
    wgrad: Gemm = field(default_factory=Gemm)
    estimator: Estimator = field(default_factory=StraightThrough)
    saved_input: SavedInput = SavedInput.INPUT
    mean_split: bool = False
    weight_from_codes: bool = False
    native_block_scales: bool = True
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if self.backend is not None and replace(self, backend=None) != LinearRecipe():
            raise ValueError(f"{self.backend} runs the layer: no other field of its recipe is read")
        if self.dgrad.b is Reuse.FPROP_CODES and not isinstance(self.fprop.b, Quantizer):
            raise ValueError("dgrad.b reuses fprop's weight codes, but fprop.b quantises nothing")
        if self.wgrad.b is Reuse.FPROP_CODES and self.fprop.a is None:
            raise ValueError("wgrad.b reuses fprop's input codes, but fprop.a quantises nothing")
        if isinstance(self.fprop.b, Reuse) or (self.saved_input.of_fprop and self.fprop.a is None):
            raise ValueError("fprop has no codes to reuse or to save")
        reused = Reuse.FPROP_CODES in (self.dgrad.b, self.wgrad.b) or self.saved_input.of_fprop
        a, b = self.fprop.a, self.wgrad.b
        carriers = a is not None and a.scale is ScaleRule.LADDER and folds(a)
        if self.saved_input is SavedInput.PACKED and (not carriers or b is Reuse.FPROP_CODES):
            raise ValueError(
                f"saved_input=packed is for FOLD3 codes that wgrad rounds again, not for {a} and wgrad.b {b}"
            )
        if self.weight_from_codes and not (isinstance(self.fprop.b, Quantizer) and isinstance(self.dgrad.b, Quantizer)):
            raise ValueError(
                f"weight_from_codes=true rounds fprop's codes of W for dgrad: fprop.b is {self.fprop.b}, dgrad.b "
                f"{self.dgrad.b}"
            )
        if self.fprop.rotation is not None and (reused or self.weight_from_codes):
            raise ValueError("fprop's codes are rotated along its own k, so a backward GEMM cannot reuse them")
        for how, codes in ((self.dgrad, self.fprop.b), (self.wgrad, self.fprop.a)):
            if how.b is Reuse.FPROP_CODES and isinstance(codes, Quantizer) and codes.outer != (-1, -1):
                raise ValueError(
                    f"the outer scales of {codes} lie along a backward reduction: no GEMM reuses its codes"
                )
        if self.saved_input is SavedInput.OPERAND and (not isinstance(self.wgrad.b, Quantizer) or self.wgrad.a is None):
            raise ValueError(f"saved_input=operand needs a quantiser on both operands of wgrad, not {self.wgrad}")
        if self.mean_split and all(gemm.a is None and gemm.b is None for gemm in self.gemms().values()):
            raise ValueError("mean_split=true takes means out of what is rounded, and no GEMM rounds anything")
        if self.dgrad.codes_only or self.wgrad.codes_only:
            raise ValueError("codes_only is for fprop: no GEMM takes the codes of a backward one")
        if self.dgrad.outliers is not None or self.wgrad.outliers is not None:
            raise ValueError("outlier clamping is for fprop's activations")
        if isinstance(self.estimator, DifferentiableEstimator) and (
            not isinstance(self.fprop.b, Quantizer) or self.fprop.b.format is not E2M1
        ):
            raise ValueError(f"DGE corrects E2M1 weights, but fprop.b is {self.fprop.b}")

    @property
    def is_identity(self) -> bool:
        """True when no GEMM is quantised."""
        return self.backend is None and self.fprop.is_identity and self.dgrad.is_identity and self.wgrad.is_identity

    @property
    def takes_values(self) -> bool:
        """True when the layer multiplies the weight's values as they come, and autograd goes through them."""
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

    def gemms(self) -> dict[str, Gemm]:
        """By name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}


def check(recipe: LinearRecipe, *, name: str, in_features: int, out_features: int, tokens: int) -> None:
    """ValueError naming the linear and the GEMM whose tile or rotation does not divide. tokens: of one micro-batch."""
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
    """The recipe with nested changes, such as {"dgrad": {"a": {"format": "E5M2"}}}. ValueError for a field that is not
    there.
    """
    if recipe.backend is not None:
        raise ValueError(
            f"precision.override={dict(changes)}: {recipe.backend} runs these layers, and has its own options"
        )
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
            raise ValueError(f"{path} is a plain value, not a group of fields")
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
            raise ValueError(f"{path}: {change!r} is none of {', '.join(members)}")
        return members[str(change).upper()]
    if key in ("tile", "outer"):
        return tuple(change)
    if key == "estimator" and change is None:
        return StraightThrough()
    if is_dataclass(old) and change is not None:
        raise ValueError(f"{path}: give its fields or null, not {change!r}")
    return _same_type(old, change, path)


def _same_type(old: Any, change: Any, path: str) -> Any:
    """A number or a flag stays one; a field that may be None takes its value as it is, for the part itself to judge."""
    wanted = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(old))
    if wanted is None or (isinstance(change, wanted) and isinstance(change, bool) == isinstance(old, bool)):
        return change
    raise ValueError(f"{path}: {change!r} is no {type(old).__name__}")
