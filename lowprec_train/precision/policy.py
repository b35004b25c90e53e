"""Which linear gets which recipe: an ordered map of name patterns, first match wins, every linear exactly one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch.nn as nn

from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe


def named_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Every Linear with its fully qualified name, in the order of the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Linear))


def count_linears(model: nn.Module) -> int:
    """Number of sites that draws are needed for."""
    return sum(1 for _ in named_linears(model))


def apply_policy(model: nn.Module, policy: Mapping[str, LinearRecipe]) -> dict[str, LinearRecipe]:
    """Sets `.recipe` of every Linear by the first glob pattern that its name matches; returns the table.

    Raises ValueError for a linear that no pattern matches, and for a pattern that no linear gets.
    """
    table: dict[str, LinearRecipe] = {}
    used: set[str] = set()
    for name, _ in named_linears(model):
        pattern = next((p for p in policy if fnmatchcase(name, p)), None)
        if pattern is None:
            raise ValueError(f"no pattern of the policy matches the linear {name!r}; patterns are {list(policy)}")
        table[name] = policy[pattern]
        used.add(pattern)
    for pattern in policy:
        if pattern not in used:
            seen = any(fnmatchcase(name, pattern) for name in table)
            why = "comes after patterns that match first" if seen else "matches no linear"
            raise ValueError(
                f"the policy's pattern {pattern!r} {why}; linears are {list(table)}, in order {list(policy)}"
            )
    for name, module in named_linears(model):
        module.recipe = table[name]
    return table


def attach_draws(model: nn.Module, draws: Draws) -> None:
    """Gives every Linear its row of the seed table, numbered in the order of the model."""
    for index, (_, module) in enumerate(named_linears(model)):
        module.draws = draws.site(index)
