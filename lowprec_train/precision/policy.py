"""Assigns recipes to linear layers by an ordered map of name patterns. The first matching pattern decides.

A pattern is a glob over fully qualified names. A numbered part may be a slice, in positions or per cent of the depth:
`blocks.*`, `blocks.*.mlp.*`, `blocks[:1].*`, `blocks[-4:].*`, `blocks[85%:].*`. Percentages round outward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.nn as nn

from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe

_SLICED = re.compile(r"(?P<stem>[^\[\]]+)\[(?P<start>[^\[\]:]*):(?P<stop>[^\[\]:]*)\](?P<rest>[^\[\]]*)")


def named_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Every Linear with its fully qualified name, in model order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def count_linears(model: nn.Module) -> int:
    """Number of Linear layers, which is the number of sites in a seed table."""
    return sum(1 for _ in named_linears(model))


@dataclass(frozen=True)
class Pattern:
    """One pattern of a policy, and the names of the model's linears. Raises ValueError for an invalid slice."""

    text: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if re.search(r"\[[^\]]*:", self.text) and not _SLICED.fullmatch(self.text):
            raise ValueError(f"the policy's pattern {self.text!r} has an invalid slice; the form is [start:stop]")
        self.matches("")

    def matches(self, name: str) -> bool:
        """True when a linear's name matches the pattern."""
        sliced = _SLICED.fullmatch(self.text)
        if sliced is None:
            return fnmatchcase(name, self.text)
        depth = 1 + max((_index(sliced["stem"], each) for each in self.names), default=-1)
        bounds = slice(self._bound(sliced["start"], depth, math.floor), self._bound(sliced["stop"], depth, math.ceil))
        index = _index(sliced["stem"], name)
        return index in range(*bounds.indices(depth)) and fnmatchcase(
            name.removeprefix(f"{sliced['stem']}.{index}"), sliced["rest"]
        )

    def _bound(self, text: str, depth: int, outward) -> int | None:  # type: ignore[no-untyped-def]
        """Start or end of the slice as a position; None when it is left out."""
        if not text:
            return None
        if re.fullmatch(r"\d+(\.\d+)?%", text) and float(text[:-1]) <= 100:
            return int(outward(round(float(text[:-1]) * depth / 100, 9)))
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        raise ValueError(
            f"the policy's pattern {self.text!r}: {text!r} is neither a position nor a percentage up to 100%"
        )


def _index(stem: str, name: str) -> int:
    """The number after the stem in a name; -1 if there is none."""
    number = re.match(rf"{re.escape(stem)}\.(\d+)(?=\.|$)", name)
    return int(number[1]) if number else -1


def resolve(model: nn.Module, policy: Mapping[str, LinearRecipe]) -> dict[str, LinearRecipe]:
    """The recipe of every Linear: that of the first pattern that matches its name. Does not change the model.

    Raises ValueError for a linear without a matching pattern, an unused pattern and an invalid slice.
    """
    names = tuple(name for name, _ in named_linears(model))
    patterns = [Pattern(text, names) for text in policy]
    table: dict[str, LinearRecipe] = {}
    used: set[str] = set()
    for name in names:
        first = next((p for p in patterns if p.matches(name)), None)
        if first is None:
            raise ValueError(f"no pattern of the policy matches the linear {name!r}; patterns are {list(policy)}")
        table[name] = policy[first.text]
        used.add(first.text)
    _all_used(patterns, used, names)
    return table


def _all_used(patterns: Sequence[Pattern], used: set[str], names: tuple[str, ...]) -> None:
    for pattern in patterns:
        if pattern.text not in used:
            shadowed = any(pattern.matches(name) for name in names)
            why = "matches only linears that earlier patterns match" if shadowed else "matches no linear"
            order = [each.text for each in patterns]
            raise ValueError(
                f"the policy's pattern {pattern.text!r} {why}; linears are {list(names)}, patterns in order {order}"
            )


def assign(model: nn.Module, table: Mapping[str, LinearRecipe]) -> None:
    """Sets `.recipe` of every Linear from a complete table."""
    for name, module in named_linears(model):
        module.recipe = table[name]


def apply_policy(model: nn.Module, policy: Mapping[str, LinearRecipe]) -> dict[str, LinearRecipe]:
    """`resolve`, then `assign`; returns the table."""
    table = resolve(model, policy)
    assign(model, table)
    return table


def attach_draws(model: nn.Module, draws: Draws) -> None:
    """Sets the default draws of every Linear, in model order, for forward passes that receive none."""
    for index, (_, module) in enumerate(named_linears(model)):
        module.draws = draws.site(index)
