"""Rounding rules as data: each maps a value to one of its two neighbours on a format's grid.

    v = x / s,  clamped to [-M, M];    codes = rule(v / step, bits) * step        step: of the binade of v

A rule takes the signed quotient in steps (FP32; exact, because steps are powers of two) and returns whole steps:

    nearest      to the nearest, ties to even
    stochastic   up in magnitude with a probability equal to the distance; bits: uniform integers in [0, 65536).
                 P(up) = round(65536 f) / 65536 for a distance of f steps: a bias of at most 2^-17 of a step

`register_rounding` adds a rule from other packages (docs/adding_a_format.md). Ops take rules by name, like formats; a
rule is never inferred from the presence of a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.ops.exponents import exp2_int, exponent
from lowprec_train.ops.formats import FP32, Format

Rule = Callable[[Tensor, Tensor | None], Tensor]  # (steps FP32, bits int32 or None) -> whole steps FP32


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A rounding rule and its name. stochastic: the rule needs 16 random bits per element and has no bias, and
    quantisers leave headroom to round up. Raises ValueError for a name that configurations do not support.
    """

    name: str
    rule: Rule
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name != self.name.lower() or not self.name.isidentifier():
            raise ValueError(f"a rounding's name has small letters, digits and underscores, not {self.name!r}")

    def __repr__(self) -> str:
        return self.name


ROUNDINGS: dict[str, Rounding] = {}
"""Name -> rule; ops look up rounding names here."""


def register_rounding(rounding: Rounding) -> Rounding:
    """Add a rule to the table, and return it; adding it again changes nothing.

    Raises ValueError if another rule has the name.
    """
    taken = ROUNDINGS.setdefault(rounding.name, rounding)
    if taken != rounding:
        raise ValueError(f"there is a rounding {rounding.name} already, with another rule")
    return taken


def parse_rounding(name: str) -> Rounding:
    """Return the rule of a name. Raises ValueError for an unknown one."""
    if name.lower() not in ROUNDINGS:
        raise ValueError(f"unknown rounding {name!r}; roundings are {', '.join(ROUNDINGS)}")
    return ROUNDINGS[name.lower()]


def _nearest(steps: Tensor, bits: Tensor | None) -> Tensor:
    return steps.round()


def _stochastic(steps: Tensor, bits: Tensor | None) -> Tensor:
    assert bits is not None
    size = steps.abs()
    whole = size.floor()
    return (whole + ((size - whole) * 65536.0 > bits.float() + 0.5)).copysign(steps)


NEAREST = register_rounding(Rounding(name="nearest", rule=_nearest))
STOCHASTIC = register_rounding(Rounding(name="stochastic", rule=_stochastic, stochastic=True))


def round_to(v: Tensor, format: Format, rounding: Rounding = NEAREST, bits: Tensor | None = None) -> Tensor:
    """Round finite FP32 values in the format's range to its grid by the rule; zeros keep the sign of v."""
    p = format.mantissa_bits
    e = exponent(v).clamp_min(max(format.min_exponent, p - 125))
    return (rounding.rule(v * exp2_int(p - e), bits) * exp2_int(e - p)).copysign(v)


def encode(v: Tensor, format: Format, rounding: Rounding = NEAREST, bits: Tensor | None = None) -> Tensor:
    """Encode scaled FP32 values: clamped first (a plain FP8 cast may not saturate); carriers with a NaN keep it."""
    if format is FP32:
        return v
    v = v.clamp(-format.max, format.max) if format.scaled else v
    if rounding is not NEAREST or not format.native:
        v = torch.where(v.isfinite(), round_to(v, format, rounding, bits), v)
    if not format.carrier.is_floating_point:  # integer carriers have no NaN: the scale of the tile is NaN
        v = torch.where(v.isnan(), 0.0, v)
    return v.to(format.carrier)
