"""A trained model for inference: the weights of a run or of an imported model, under the run's recipe or any other.

Only the forward pass of a recipe is used. Operands of the backward GEMMs are not made, so tiles along the tokens do not
restrict the number of tokens: a model trained under MXFP4 can process a single token. The forward pass gives the same
numbers as in training, including norms and activations with rounded inputs (COAT). Weights are stored in the dtype to
which linears cast them in training.

Scales that span several tokens, e.g. one per tensor, make a token's logits depend on the other tokens of the batch by
a rounding: with `fp8` or `nvfp4` a loss changes by 1e-5 or 1e-4 nats with the size of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.config import LAUNCHED, PrecisionConfig, RunConfig, read_object
from lowprec_train.model.transformer import Transformer
from lowprec_train.precision import policy
from lowprec_train.precision.recipe import Gemm, LinearRecipe
from lowprec_train.precision.saved_activations import apply_saved_activations
from lowprec_train.precision.schedule import Phase
from lowprec_train.train import build, checks, renamed_keys
from lowprec_train.train.command_line import meant
from lowprec_train.train.compose import composed
from lowprec_train.train.trainer import EVALUATION_STEP
from lowprec_train.train.weights import RunWeights, fill_from, open_weights, without_memory

OF_RUN = "run"  # in place of a recipe's name: the recipe of the run at this checkpoint
UNQUANTISED = "bf16"
UNROUNDED = "fp32"  # rounds nothing, for comparison with other programs


class Trained:
    """A run's checkpoint, or an imported directory, from which models are built.

    path, step: as in `weights.open_weights`, which raises ValueError for invalid ones.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self.weights = open_weights(path, step)
        self.directory, _ = config.run_and_step(path)
        self.step = self.weights.step if isinstance(self.weights, RunWeights) else None
        self._forward: dict[str, Phase] = {}

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The content of run.json; empty for an imported directory."""
        return read_object(self.directory / "run.json")

    def recipe_name(self, recipe: str) -> str:
        """Return the name of a recipe; for "run" that of the run's recipe."""
        return str(self.facts.get("recipe", UNQUANTISED)) if recipe == OF_RUN else recipe

    def forward(self, recipe: str) -> Phase:
        """Return what every linear, norm and activation computes in the forward pass. Equal phases compute the same.

        Raises ValueError for an unknown recipe and for one whose tiles do not divide the model's sizes.
        """
        if recipe not in self._forward:
            self._forward[recipe] = self._made(recipe)
        return self._forward[recipe]

    def computed_as(self, recipes: Sequence[str]) -> dict[str, str]:
        """Return the first of `recipes` with the same forward pass as each. Raises ValueError as `forward` does."""
        passes = {recipe: (self.forward(recipe), dtype_of(recipe)) for recipe in recipes}
        return {recipe: next(first for first in passes if passes[first] == passes[recipe]) for recipe in passes}

    def model(self, recipe: str, *, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
        """Return the model on `device`. The residual stream and unquantised GEMMs are in `dtype`.

        recipe: "run", "fp32", or the name of a file of configs/recipe. dtype: None for FP32 under "fp32", else BF16.
        Raises ValueError as `forward` does, for another dtype under "fp32", and for weights that cannot be read.
        """
        dtype = dtype_of(recipe, dtype)
        phase, model = self.forward(recipe), self._laid_out(dtype)
        for _, linear in policy.named_linears(model):
            linear.to(dtype)
        seeds = build.weights(model, device, 0, fill_from(self.weights))
        policy.attach_draws(model, seeds.at(EVALUATION_STEP, 0))
        policy.assign(model, phase.recipes)
        apply_saved_activations(model, phase.saved_activations)
        return model.eval().requires_grad_(False)

    def _made(self, recipe: str) -> Phase:
        model, run = self._laid_out(torch.bfloat16), self._precision(recipe)
        step = max(0, (self.step or 0) - 1) if recipe == OF_RUN else 0  # the last finished step, 0-based
        last = [each for each in build.phases(run, model) if each.first_step <= step][-1]
        phase = Phase(
            first_step=0,
            recipes={name: forward_part(each) for name, each in last.recipes.items()},
            saved_activations=last.saved_activations,
        )
        if phase.backend is not None:
            raise ValueError(
                f"recipe {self.recipe_name(recipe)}: {phase.backend} supports training only; use --recipe "
                f"{UNQUANTISED} or fp8, which compute with the same weights"
            )
        checks.linears(model, phase.recipes, tokens=1)
        phase.saved_activations.check(model)
        return phase

    def _laid_out(self, dtype: torch.dtype) -> Transformer:
        return without_memory(replace(self.weights.model, **LAUNCHED), dtype=dtype)

    def _precision(self, recipe: str) -> RunConfig:
        """Return a run configuration of which only the precision is used."""
        saved = self.directory / "config.yaml"
        if recipe == OF_RUN and saved.is_file():
            tree: Any = config.read_yaml(saved)
            renamed_keys.refuse(tree, f"{saved}", "--recipe NAME, with one of configs/recipe, does not read it")
            precision = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PrecisionConfig), tree.precision))
            assert isinstance(precision, PrecisionConfig)
            return RunConfig(steps=tree.steps, precision=precision)
        name, known = UNQUANTISED if recipe == UNROUNDED else self.recipe_name(recipe), config.choices("recipe")
        if name not in known:
            known = [OF_RUN, *known, UNROUNDED]
            guess = meant(name, known)
            suggestion = f"; did you mean {guess}?" if guess else ""
            raise ValueError(f"recipe {name!r} is not one of {', '.join(known)}{suggestion}")
        return composed(f"+recipe={name}")


def dtype_of(recipe: str, dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of unquantised ops under this recipe. Raises ValueError for "fp32" with another dtype."""
    default = torch.float32 if recipe == UNROUNDED else torch.bfloat16
    if recipe == UNROUNDED and dtype not in (None, default):
        raise ValueError(f"recipe {UNROUNDED} computes in {default}, not in {dtype}")
    return dtype or default


def forward_part(recipe: LinearRecipe) -> LinearRecipe:
    """Return a recipe with the forward GEMM of this one and unquantised backward GEMMs."""
    if recipe.backend is not None:
        return recipe
    fprop = Gemm() if recipe.fprop.codes_only else recipe.fprop
    return LinearRecipe(fprop=fprop, mean_split=recipe.mean_split and fprop.a is not None)
