"""`lowprec bench linear`: one linear layer forward and backward with several recipes: quantisation and three GEMMs.

The time that faster GEMMs save may be lost again in quantisation of the operands; one layer shows the sum of both.
Layers are compiled as in a block, contestants take turns, and all use BF16 parameters and gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Interval
from lowprec_train.train import build
from lowprec_train.train.compose import composed

TOKENS = 16384
SHAPES = ((4096, 11008), (11008, 4096), (4096, 22016))  # in, out: the feed-forward net of LLaMA 7B
BASELINE = "bf16"


def recipe(name: str) -> LinearRecipe:
    """Return the first recipe in the policy of `+recipe=<name>`. Raises ValueError for an unknown recipe."""
    policy = composed(f"+recipe={name}").precision.policy
    return next(iter(build.recipes(policy, {}).values()))


def recipes(names: Sequence[str]) -> dict[str, LinearRecipe]:
    """Return recipes by name, always with BF16."""
    return {name: recipe(name) for name in dict.fromkeys((BASELINE, *names))}


def measure(
    device: torch.device,
    recipes: dict[str, LinearRecipe],
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: int = TOKENS,
    rounds: int = 15,
    compiled: bool = True,
) -> dict[str, Any]:
    """Return `rows`: milliseconds of a forward and a backward pass by recipe, for each shape."""
    return {"tokens": tokens, "rows": [_row(device, recipes, shape, tokens, rounds, compiled) for shape in shapes]}


def _row(
    device: torch.device,
    recipes: dict[str, LinearRecipe],
    shape: tuple[int, int],
    tokens: int,
    rounds: int,
    compiled: bool,
) -> dict[str, Any]:
    passes: dict[str, Callable[[], None]] = {}
    errors: dict[str, str] = {}
    for name, each in recipes.items():
        try:
            passes[name] = _pass(device, each, shape, tokens, compiled)
            for _ in range(3):
                passes[name]()
        except Exception as error:  # this machine does not support the recipe
            errors[name] = cause(error)
            passes.pop(name, None)
    intervals: dict[str, list[Interval]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, call in passes.items():
            with Interval(device) as interval:
                call()
            intervals[name].append(interval)
    ms = {name: statistics.median(each.ms for each in taken) for name, taken in intervals.items()}
    return {"shape": list(shape), "ms": ms, "errors": errors}


def _pass(
    device: torch.device, recipe: LinearRecipe, shape: tuple[int, int], tokens: int, compiled: bool
) -> Callable[[], None]:
    layer = Linear(*shape, bias=False, device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=0.02)
    layer.draws, layer.recipe = SeedTable(0, 1, device).at(1, 0).site(0), recipe
    if compiled:
        torch.compiler.reset()
    forward = torch.compile(layer.forward, fullgraph=True) if compiled else layer.forward
    x = torch.randn(tokens, shape[0], device=device, dtype=torch.bfloat16)
    dy = 1e-3 * torch.randn(tokens, shape[1], device=device, dtype=torch.bfloat16)

    def call() -> None:
        forward(x.detach().requires_grad_()).backward(dy)
        layer.weight.grad = None

    return call
