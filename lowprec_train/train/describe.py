"""Describe a run at its start: the recipe, its overrides, and how each GEMM of every layer is executed.

Layers with the same recipe and plan share an entry. recipe.json has the same facts with one entry per layer.
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

import lowprec_train
from lowprec_train.config import Compile, PrecisionConfig
from lowprec_train.data.corpus import Corpus
from lowprec_train.model.attention import Attention
from lowprec_train.model.layers import Rotary
from lowprec_train.model.transformer import Block, Transformer
from lowprec_train.numerics.formats import Format, Rounding
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.parallel.all_gather_format import all_gather_format
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import LinearPlan
from lowprec_train.precision.plan import compile_plan
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.saved_activations import SavedActivationPolicy, saved_inputs
from lowprec_train.precision.schedule import Phase
from lowprec_train.train.identity import flatten
from lowprec_train.train.weights import tokenizer_facts

# Command-line arguments that change a recipe: how layers compute, how gradients are reduced, how states are stored.
CHANGES = re.compile(
    r"[+~]*(precision\.(?!override\b)|comm[=.]|optim(=|/(moment|master)|\.(first|second)_moment|\.master|\.rule))"
)
Plans = dict[str, LinearPlan]  # by the name of the linear
Linears = dict[str, dict[str, Any]]  # module name -> shape, gemms, execution, plan, recipe, ...
INDEX = r"\.\d+\."  # of a block, in a module name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The name of the recipe, and the overrides that the command line adds to it."""

    recipe: str
    overrides: list[str]
    undone: str | None

    @classmethod
    def of(cls, precision: PrecisionConfig, groups: Mapping[str, str], command_line: Sequence[str]) -> "Choice":
        """groups: choices that Hydra made; command_line: overrides as they were typed."""
        chosen = groups.get("recipe")
        replaced = precision.name != chosen and any(typed.startswith("precision=") for typed in command_line)
        undone = f"precision={precision.name} undoes +recipe={chosen}" if chosen and replaced else None
        tree = {"precision": {"override": precision.override}} if precision.override else {}
        changes = [f"{key}={value}" for key, value in flatten(tree).items()]
        typed = [argument for argument in command_line if CHANGES.match(argument)]
        name = precision.name if undone or not chosen else chosen
        return cls(recipe=name, overrides=changes + typed + ([undone] if undone else []), undone=undone)


def versions() -> dict[str, str]:
    """Return the versions of the software on which a run's numbers depend."""
    return {"lowprec_train": lowprec_train.__version__, "torch": torch.__version__, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """Return `cpu`, or the product name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def first_line(facts: Mapping[str, Any]) -> str:
    """Return one sentence: what runs, and how it differs from the published recipe."""
    parts = [
        f"run {facts['name']}: recipe {facts['recipe']}",
        f"{facts['model']} with {facts['parameters'] / 1e6:.1f} M parameters",
        f"on {facts['device']}, {'compiled' if facts['compiled'] else 'eager'}, attention {facts['attention']}",
        *([f"initialised from {facts['weights']}"] if facts.get("weights") else []),
        *([f"overrides: {', '.join(facts['overrides'])}"] if facts["overrides"] else []),
        *([f"not as published: {', '.join(facts['deviations'])}"] if facts["deviations"] else []),
    ]
    return "; ".join(parts)


def plain(value: Any) -> Any:
    """Return a recipe as JSON: dataclasses as dictionaries, formats and rules by name."""
    if isinstance(value, Enum | Format | Rounding):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


@dataclass(frozen=True, kw_only=True)
class MetaModel:
    """A model on the meta device, and its precision phases."""

    model: Transformer
    phases: tuple[Phase, ...]
    tokens: int  # per micro-batch
    param_all_gather: str  # format in which weights are all-gathered (`parallel.all_gather_format`)
    compile: Compile

    def plans(self, device: torch.device, *, shards: int = 1) -> list[Plans]:
        """Return the plan of each linear layer in each phase. shards: number of row shards of each weight."""
        return [self._plans(phase, device, shards) for phase in self.phases]

    def _plans(self, phase: Phase, device: torch.device, shards: int) -> Plans:
        model, form = self.model, self.param_all_gather
        producers, consumers = amax_left(model, phase.saved_activations, device)
        compiled = self.compile is Compile.on or (self.compile is Compile.auto and device.type != "cpu")
        for block in (each for each in model.blocks if isinstance(each, Block)):
            block.save_norm_inputs(compiled and phase.saved_activations.of("norm") is None)
        found = {}
        for name, recipe in phase.recipes.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, Linear)
            cut = None if linear.split is None else linear.split.dim
            weight_format = all_gather_format(
                recipe, linear.shard_shape, shards=shards, param_all_gather=form, split=cut
            )
            plan = compile_plan(
                recipe,
                linear.shard_shape,
                self.tokens,
                device,
                dtype=model.dtype,
                split=linear.split,
                gathered=weight_format.quantizer is not None,
                producer=producers.get(name, ""),
                consumer=consumers.get(name, "") if linear.bias is None else "",
            )
            found[name] = linear.placed(plan)
        return found


def amax_left(
    model: Transformer, policy: SavedActivationPolicy, device: torch.device
) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by linear, the op that computes the amax of its X, and what reads its y and computes the amax or codes of
    its dY.
    """
    producers: dict[str, str] = {}
    consumers: dict[str, str] = {}
    for name, module in saved_inputs(model):
        op = module.runs(policy.of(module.role), device, model.dtype)
        if op and module.feeds:
            producers[f"{name}.{module.feeds}"] = consumers[f"{name}.{module.fed_by}"] = op
    if isinstance(model.position, Rotary):
        plain = (name for name, each in model.named_modules() if isinstance(each, Attention) and each.is_plain)
        consumers |= {f"{name}.qkv": "rotary" for name in plain}
    return producers, consumers


def effective(recipes: Mapping[str, LinearRecipe], plans: Plans) -> Linears:
    """Return the content of recipe.json: per linear layer its shape [out, in], recipe, operands and execution paths."""
    return {
        name: {
            "shape": list(plans[name].shape),
            "gemms": {gemm_name: str(recipe.backend or each) for gemm_name, each in recipe.gemms().items()},
            "estimator": str(recipe.estimator),
            "execution": plans[name].paths(),
            "operands": plans[name].describe(),
            "recipe": plain(recipe),
        }
        for name, recipe in recipes.items()
    }


def tables(meta: MetaModel, plans: Sequence[Plans], device: torch.device) -> list[dict[str, Any]]:
    """Return the linears of the first phase as `effective` does; then for each later phase its first step, its linears
    and what it saves.
    """
    first, *later = (effective(phase.recipes, each) for phase, each in zip(meta.phases, plans, strict=True))
    found: list[dict[str, Any]] = [first]
    for phase, table in zip(meta.phases[1:], later, strict=True):
        activations = saved(meta.model, phase.saved_activations, device)
        found.append({"first_step": phase.first_step, "linears": table, "saved": activations})
    return found


def saved(model: Transformer, policy: SavedActivationPolicy, device: torch.device) -> dict[str, str]:
    """Return what the norms and activations of blocks save for the backward pass, and the op that produces it."""
    described = {}
    for role in ("norm", "activation"):
        quantizer = policy.of(role)
        ops = {module.runs(quantizer, device, model.dtype) for _, module in saved_inputs(model) if module.role == role}
        by = ", ".join(sorted(op or "several ops" for op in ops)) if quantizer is not None or ops - {""} else ""
        described[role] = f"{quantizer or 'input'}{' by ' if by else ''}{by}"
    return described


def backend(phases: Sequence[Phase]) -> dict[str, str]:
    """Return the library that runs linear layers, its version and its recipe's settings; empty without one."""
    for found in filter(None, (phase.backend for phase in phases)):
        return {"backend": f"{found}, version {found.version}", "backend_settings": found.settings()}
    return {}


def text_facts(text: Corpus) -> dict[str, Any]:
    """Return run.json's facts of the corpus."""
    return {
        "corpus": text.name,
        "corpus_hash": text.hash,
        **tokenizer_facts(text.tokenizer),
        "train_tokens": text.train.tokens,
        "valid_tokens": text.valid.tokens,
        "valid_unigram_entropy": text.valid.unigram_entropy(),
    }


def by_reference(phases: Sequence[Phase], device: torch.device) -> list[str]:
    """Return the quantisers of a run that have no compiled kernel on this device, as text."""
    gemms = (gemm for phase in phases for recipe in phase.recipes.values() for gemm in recipe.gemms().values())
    operands = [operand for gemm in gemms for operand in (gemm.a, gemm.b)]
    operands += [phase.saved_activations.of(role) for phase in phases for role in ("norm", "activation")]
    return sorted({str(each) for each in operands if isinstance(each, Quantizer) and each.on_reference(device)})


def summary(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table as text: one line per kind of layer, one line per GEMM with operands and [execution path], and
    one line per operand with its source and its kernel.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, row in table.items():
        description = []
        for each, text in row["gemms"].items():
            description.append(f"{each} {text} [{row['execution'][each]}]")
            description += [f"  {operand:<5} {origin}" for operand, origin in row["operands"][each].items()]
        label = f"{re.sub(INDEX, '.*.', name)} {'x'.join(map(str, row['shape']))}"
        groups.setdefault((*description, row["estimator"]), []).append(label)
    lines = []
    for texts, names in groups.items():
        lines.append("  " + ", ".join(f"{name} ({n} layers)" if n > 1 else name for name, n in Counter(names).items()))
        lines += [f"    {text}" for text in texts]
    return "\n".join(lines)
