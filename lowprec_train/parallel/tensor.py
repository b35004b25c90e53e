"""Tensor parallelism: which part of each layer a rank has, and checks that a layout can have such parts.

    column      rows of a weight [n, k], a part of the outputs: qkv, gate_up, up, the head (its vocabulary)
    row         columns of a weight, a part of the inputs: attention.out, mlp.down
    vocabulary  rows of an embedding

A column-parallel layer followed by a row-parallel one needs one all-gather of rows before and one reduce-scatter of
sums after. Between them a rank has whole key-value heads and whole (gate, up) pairs of all tokens; elsewhere it has its
own rows of the tokens. `Transformer.tensor_plan` says how each module is divided. This module replaces parameters by
parts, still on the meta device, and sets the `Split` of modules. A part is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lowprec_train.group import Group
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.recipe import check as check_recipe
from lowprec_train.precision.saved_activations import QuantizedSavedInput, SavedActivationPolicy
from lowprec_train.precision.split import Split

CUT = {"column": 0, "vocabulary": 0, "row": 1}  # the divided dimension of the weight
GROUP = 8  # elements per random draw


class TensorParallelModel(Protocol):
    """What tensor parallelism reads from a model, and what it sets."""

    kv_heads: int
    vocab_size: int
    group: Group | None
    cross_entropy: Any

    def tensor_plan(self) -> dict[str, str]:
        """Return how each module with a matrix is divided, by name; other modules are whole on every rank."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def check(
    model: TensorParallelModel,
    parts: int,
    *,
    tokens: int,
    recipes: Sequence[Mapping[str, LinearRecipe]],
    saved_activations: Sequence[SavedActivationPolicy] = (),
) -> None:
    """Raise ValueError, with the numbers, if `parts` ranks cannot divide a micro-batch of `tokens` and each layer.

    recipes: of every linear, for each phase of the run: tiles and rotations must lie within a part.
    saved_activations: what norms and activations save: groups of channels must lie within a part.
    """
    problems = [f"model.{what}={size}" for what, size in _shared(model) if size % parts]
    if tokens % (parts * GROUP):
        problems.append(f"{tokens} tokens of a micro-batch (in groups of {GROUP} per rank)")
    if problems:
        raise ValueError(f"parallel.tp={parts} does not divide {', '.join(problems)}")
    for name, module in model.named_modules():
        if getattr(module, "across_heads", False):
            raise ValueError(
                f"parallel.tp={parts} divides heads, and {name} ({type(module).__name__}) needs all heads of a token"
            )
    for name, how in model.tensor_plan().items():
        part = _whole(model.get_submodule(name), how) // parts
        if part % GROUP:
            raise ValueError(f"parallel.tp={parts} gives a rank {part} of {name}; random draws need groups of {GROUP}")
        for table in recipes if name in recipes[0] else ():
            _check_linear(table[name], model.get_submodule(name), name, how, part, tokens)
    for quantizer in (saved.activation for saved in saved_activations if saved.activation is not None):
        for width in {module.width for module in _activations(model)}:
            group = width if quantizer.tile[1] == -1 else quantizer.tile[1]
            if width // parts % group:
                raise ValueError(
                    f"parallel.tp={parts} gives a rank {width // parts} of model.ffn={width}, and activations are "
                    f"saved in groups of {group} channels"
                )


def apply(model: TensorParallelModel, group: Group) -> dict[str, int]:
    """Replace the planned parameters of `model`, on the meta device, by this rank's parts without values.

    Returns the divided dimension of each parameter, by name; other parameters are whole.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, int] = {}
    for name, how in model.tensor_plan().items():
        module = model.get_submodule(name)
        split = Split(dim=CUT[how], group=group, whole=_whole(module, how))
        module.split = split  # type: ignore[assignment]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if split.dim < parameter.ndim:
                cuts[names[parameter]] = split.dim
                shape = [split.part if dim == split.dim else size for dim, size in enumerate(parameter.shape)]
                setattr(module, key, nn.Parameter(torch.empty(shape, device="meta", dtype=parameter.dtype)))
    for module in _activations(model):
        module.width //= group.size
    model.cross_entropy.split = model.get_submodule("head").split
    model.group = group
    return cuts


def row_parallel_columns(model: TensorParallelModel) -> dict[str, int]:
    """Return the columns of each weight that is divided by columns, by the name of its layer."""
    return {name: _whole(model.get_submodule(name), how) for name, how in model.tensor_plan().items() if how == "row"}


def summed_over_tp(model: nn.Module) -> list[str]:
    """Return the names of the vectors whose gradient is a partial sum on every rank: each meets its rows of the tokens.

    Norms, and biases that are added to sums (row-parallel layers); column-parallel biases are cut like their outputs.
    """
    found = []
    for name, module in model.named_modules():
        cut = getattr(module, "split", None)
        vectors = (key for key, p in module.named_parameters(name, recurse=False) if p.ndim == 1)
        found += [key for key in vectors if cut is None or cut.dim == 1]
    return found


def _shared(model: TensorParallelModel) -> list[tuple[str, int]]:
    """Return the sizes that must be divisible."""
    widths = {module.width for module in _activations(model)}
    return [
        ("kv_heads", model.kv_heads),
        ("vocab_size", model.vocab_size),
        *(("ffn", width) for width in sorted(widths)),
    ]


def _activations(model: TensorParallelModel) -> list[QuantizedSavedInput]:
    """Return the layers between a column-parallel linear and a row-parallel one."""
    return [m for _, m in model.named_modules() if isinstance(m, QuantizedSavedInput) and m.role == "activation"]


def _whole(module: nn.Module, how: str) -> int:
    """Return the size of the divided dimension; a tied head has no weight of its own."""
    if isinstance(module, Linear):
        return module.in_features if how == "row" else module.out_features
    assert isinstance(module, nn.Embedding)
    return module.num_embeddings


def _check_linear(recipe: LinearRecipe, linear: nn.Module, name: str, how: str, part: int, tokens: int) -> None:
    assert isinstance(linear, Linear)
    n, k = (linear.out_features, part) if how == "row" else (part, linear.in_features)
    check_recipe(recipe, name=f"a rank's part of {name}", in_features=k, out_features=n, tokens=tokens)
