"""Rounding rules as data: how a value between two neighbours on a format's grid becomes one of them.

    v = x / s,  clamped to [-M, M];    codes = rule(v / step, bits) * step        step: that of v's binade

A rule takes the quotient in steps (FP32, with its sign; exact, for a step is a power of two) and returns whole steps:

    nearest      to the nearest, ties to the even one
    stochastic   up in magnitude with the probability of the distance; bits: uniform integers in [0, 65536). P(up) =
                 round(65536 f) / 65536 for a distance of f steps: a bias of at most 2^-17 of a step

`register_rounding` adds a rule from outside of the package (docs/adding_a_format.md). A rule crosses an op's schema by
its name, as a format does; a seed is what it draws from, never what tells it apart.
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
    """A rule by its name. stochastic: it takes random bits, 16 an element, and rounds without a bias, so that a
    quantiser leaves it the head-room to round up. Raises ValueError for a name that no configuration can hold.
    """

    name: str
    rule: Rule
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.name != self.name.lower() or not self.name.isidentifier():
            raise ValueError(f"a rounding's name is small letters, digits and underscores, not {self.name!r}")

    def __repr__(self) -> str:
        return self.name


ROUNDINGS: dict[str, Rounding] = {}
"""Name -> rule: what an op is told by a name, it looks up here."""


def register_rounding(rounding: Rounding) -> Rounding:
    """Put a rule into the table, and return it; the same one again changes nothing.

    Raises ValueError for a name that another rule has.
    """
    taken = ROUNDINGS.setdefault(rounding.name, rounding)
    if taken != rounding:
        raise ValueError(f"there is a rounding {rounding.name} already, by another rule")
    return taken


def parse_rounding(name: str) -> Rounding:
    """The rule of a name. Raises ValueError for an unknown one."""
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
    """Finite FP32 values in the format's range -> values on its grid, by the rule; a zero keeps the sign of v."""
    p = format.mantissa_bits
    e = exponent(v).clamp_min(max(format.min_exponent, p - 125))
    return (rounding.rule(v * exp2_int(p - e), bits) * exp2_int(e - p)).copysign(v)


def encode(v: Tensor, format: Format, rounding: Rounding = NEAREST, bits: Tensor | None = None) -> Tensor:
    """Scaled FP32 values -> codes: clamped first (a plain FP8 cast does not promise saturation), NaN kept."""
    if format is FP32:
        return v
    v = v.clamp(-format.max, format.max) if format.scaled else v
    if rounding is not NEAREST or not format.native:
        v = torch.where(v.isfinite(), round_to(v, format, rounding, bits), v)
    if not format.carrier.is_floating_point:  # no NaN there: the tile's scale carries it
        v = torch.where(v.isnan(), 0.0, v)
    return v.to(format.carrier)
