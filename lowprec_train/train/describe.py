"""Describe a run at its start: the recipe, its overrides, and how each GEMM of every layer is executed.

Layers that compute alike share an entry. The same facts, one entry a layer, go into recipe.json.
"""

import dataclasses
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

import lowprec_train
from lowprec_train.config import PrecisionConfig
from lowprec_train.numerics.formats import Format, Rounding
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision import gemm
from lowprec_train.precision.block_keep import BlockKeep
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.schedule import Phase
from lowprec_train.train.identity import flatten

# What a command line may change in a recipe: how layers compute, how gradients travel, how states are stored.
CHANGES = re.compile(
    r"[+~]*(precision\.(?!override\b)|comm[=.]|optim(=|/(moment|master)|\.(first|second)_moment|\.master|\.rule))"
)
Linears = dict[str, dict[str, Any]]  # module name -> shape, gemms, execution, recipe, ...
INDEX = r"\.\d+\."  # of a block


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The name of the recipe, and what the command line changed in it."""

    recipe: str
    overrides: list[str]
    undone: str | None

    @classmethod
    def of(cls, precision: PrecisionConfig, groups: Mapping[str, str], command_line: Sequence[str]) -> "Choice":
        """groups: choices that Hydra made; command_line: overrides as they were typed."""
        asked = groups.get("recipe")
        replaced = precision.name != asked and any(typed.startswith("precision=") for typed in command_line)
        undone = f"precision={precision.name} undoes +recipe={asked}" if asked and replaced else None
        tree = {"precision": {"override": precision.override}} if precision.override else {}
        changes = [f"{key}={value}" for key, value in flatten(tree).items()]
        typed = [argument for argument in command_line if CHANGES.match(argument)]
        name = precision.name if undone or not asked else asked
        return cls(recipe=name, overrides=changes + typed + ([undone] if undone else []), undone=undone)


def versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    return {"lowprec_train": lowprec_train.__version__, "torch": torch.__version__, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """`cpu`, or the product name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def first_line(facts: Mapping[str, Any]) -> str:
    """One sentence that says what runs and in what it departs from the published recipe."""
    parts = [
        f"run {facts['name']}: recipe {facts['recipe']}",
        f"{facts['model']} with {facts['parameters'] / 1e6:.1f} M parameters",
        f"on {facts['device']}, {'compiled' if facts['compiled'] else 'eager'}, attention {facts['attention']}",
        *([f"beginning with {facts['weights']}"] if facts.get("weights") else []),
        *([f"overrides: {', '.join(facts['overrides'])}"] if facts["overrides"] else []),
        *([f"not as published: {', '.join(facts['deviations'])}"] if facts["deviations"] else []),
    ]
    return "; ".join(parts)


def plain(value: Any) -> Any:
    """A recipe as JSON: dataclasses as dictionaries, things with a name (formats, rules) as that name."""
    if isinstance(value, Enum | Format | Rounding):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def effective(model: nn.Module, recipes: Mapping[str, LinearRecipe], device: torch.device) -> Linears:
    """Per linear layer: shape [out, in], recipe, and the path of each GEMM. The content of recipe.json."""
    table = {}
    for name, recipe in recipes.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        table[name] = {
            "shape": [linear.out_features, linear.in_features],
            "gemms": {gemm_name: str(each) for gemm_name, each in recipe.gemms().items()},
            "estimator": str(recipe.estimator),
            "keeps": recipe.keep.value,
            "execution": gemm.execution(recipe, linear.in_features, linear.out_features, device),
            "recipe": plain(recipe),
        }
    return table


def later(phases: Sequence[Phase], linears: Sequence[Linears]) -> list[dict[str, Any]]:
    """The phases after the first, each with its first step and its linears as from `effective`."""
    pairs = zip(phases[1:], linears[1:], strict=True)
    return [{"first_step": p.first_step, "linears": table, "kept": kept(p.keep)} for p, table in pairs]


def kept(keep: BlockKeep) -> dict[str, str]:
    """What the norms and the activations of blocks keep for the backward pass."""
    return {role: str(keep.of(role) or "input") for role in ("norm", "activation")}


def by_reference(phases: Sequence[Phase], device: torch.device) -> list[str]:
    """The quantisers of a run whose format or rounding no compiled kernel of the device knows, in words."""
    gemms = (gemm for phase in phases for recipe in phase.recipes.values() for gemm in recipe.gemms().values())
    asked = [operand for gemm in gemms for operand in (gemm.a, gemm.b)]
    asked += [phase.keep.of(role) for phase in phases for role in ("norm", "activation")]
    return sorted({str(each) for each in asked if isinstance(each, Quantizer) and each.on_reference(device)})


def summary(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The table for people: per kind of layer one line, then one line a GEMM with operands and [execution path]."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, row in table.items():
        gemms = (
            *(f"{each} {text} [{row['execution'][each]}]" for each, text in row["gemms"].items()),
            f"keeps {row['keeps']}, {row['estimator']}",
        )
        groups.setdefault(gemms, []).append(f"{re.sub(INDEX, '.*.', name)} {'x'.join(map(str, row['shape']))}")
    lines = []
    for gemms, names in groups.items():
        lines.append("  " + ", ".join(f"{name} ({n} layers)" if n > 1 else name for name, n in Counter(names).items()))
        lines += [f"    {text}" for text in gemms]
    return "\n".join(lines)
