"""Which linear gets which recipe: an ordered map of name patterns, first match wins, every linear exactly one.

A pattern is a glob over fully qualified names, in which a numbered part may be a slice, in positions or per cent of the
depth: `blocks.*`, `blocks.*.mlp.*`, `blocks[:1].*`, `blocks[-4:].*`, `blocks[85%:].*`. Per cent round outward: a slice
holds at least its share.
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
    """Every Linear with its fully qualified name, in the order of the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def count_linears(model: nn.Module) -> int:
    """Number of sites that draws are needed for."""
    return sum(1 for _ in named_linears(model))


@dataclass(frozen=True)
class Pattern:
    """One pattern of a policy over the names of one model. Raises ValueError for a slice that cannot be read."""

    text: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if re.search(r"\[[^\]]*:", self.text) and not _SLICED.fullmatch(self.text):
            raise ValueError(f"the policy's pattern {self.text!r} holds a slice that is not [start:stop]")
        self.matches("")

    def matches(self, name: str) -> bool:
        """Whether a linear's name fits."""
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
        raise ValueError(f"the policy's pattern {self.text!r}: {text!r} is no position and no share of up to 100%")


def _index(stem: str, name: str) -> int:
    """The number that follows the stem in a name; -1 when none does."""
    number = re.match(rf"{re.escape(stem)}\.(\d+)(?=\.|$)", name)
    return int(number[1]) if number else -1


def resolve(model: nn.Module, policy: Mapping[str, LinearRecipe]) -> dict[str, LinearRecipe]:
    """The recipe of every Linear by the first pattern that its name matches; nothing is set.

    Raises ValueError for a linear that no pattern matches, for a pattern that no linear gets, and for a bad slice.
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
            seen = any(pattern.matches(name) for name in names)
            why = "comes after patterns that match first" if seen else "matches no linear"
            order = [each.text for each in patterns]
            raise ValueError(
                f"the policy's pattern {pattern.text!r} {why}; linears are {list(names)}, patterns in order {order}"
            )


def assign(model: nn.Module, table: Mapping[str, LinearRecipe]) -> None:
    """Sets `.recipe` of every Linear from a table that names them all."""
    for name, module in named_linears(model):
        module.recipe = table[name]


def apply_policy(model: nn.Module, policy: Mapping[str, LinearRecipe]) -> dict[str, LinearRecipe]:
    """`resolve`, then `assign`; returns the table."""
    table = resolve(model, policy)
    assign(model, table)
    return table


def attach_draws(model: nn.Module, draws: Draws) -> None:
    """Gives every Linear draws of its own for good, in the order of the model: for passes that are given none."""
    for index, (_, module) in enumerate(named_linears(model)):
        module.draws = draws.site(index)
