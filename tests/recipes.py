"""Every recipe that ships, built from its configuration as a run builds it, small enough for tests.

`RECIPES` are values of one linear layer; a *system* is what `+recipe=` names: policy by module and by time, kept
activations, optimizer codecs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lowprec_train import config
from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.precision.policy import apply_policy
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.recipes import (
    averis,
    bf16,
    fp4,
    fp4_fold,
    fp4_mixed,
    fp8,
    fp8_block,
    fp8_eden4,
    fp8_rowwise,
    int8_switchback,
    mxfp4,
    mxfp4_fp8,
    mxfp8,
    nvfp4,
    quartet2,
    reduced_mantissa,
    ufp4,
    w4a8,
)
from lowprec_train.train import build as parts
from lowprec_train.train import build_optimizer

RECIPES: dict[str, LinearRecipe] = {
    "bf16": bf16.recipe(),
    "fp8": fp8.recipe(),
    "fp8_rowwise": fp8_rowwise.recipe(),
    "fp8_block": fp8_block.recipe(),
    "mxfp8": mxfp8.recipe(),
    "fp4": fp4.recipe(),
    "fp4_residual": fp4.recipe(outliers="residual"),
    "fp4_unclamped": fp4.recipe(alpha=1.0),
    "fp4_mixed": fp4_mixed.feed_forward(),
    "mxfp4": mxfp4.recipe(),
    "mxfp4_fp8": mxfp4_fp8.recipe(),
    "fp4_fold": fp4_fold.recipe(),
    "fp8_eden4": fp8_eden4.recipe(),
    "nvfp4": nvfp4.recipe(),
    "nvfp4_lines": nvfp4.recipe(square=False, row_scaled=True, select="4over6"),
    "quartet2": quartet2.recipe(),
    "ufp4": ufp4.recipe(),
    "w4a8": w4a8.recipe(),
    "reduced_mantissa": reduced_mantissa.recipe(),
    "averis": averis.recipe(of=nvfp4.recipe()),
    "int8_switchback": int8_switchback.recipe(),
}
BY_A_LIBRARY = ("te_fp8",)
"""Recipes whose layers need a GPU and a library: tests/test_main_backend.py runs them."""
SYSTEMS = [name for name in config.choices("recipe") if name not in BY_A_LIBRARY]
BY_NIGHT = ("averis", "fp8_eden4", "quartet2", "reduced_mantissa", "ufp4", "w4a8")
"""Recipes made of parts that others have, too: what takes seconds a recipe is `nightly` for them."""
KINDS = ("fp8", "fp8_rowwise", "coat", "fp4", "mxfp4_fp8", "nvfp4", "fp4_fold")
"""Tensor and row scales, blocks of two sizes, draws, rotations, outliers, carriers, inputs that are saved in codes."""
MODELS = ("llama_tiny", "gpt_tiny")

LLAMA: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "tied": False,
}
GPT: Mapping[str, Any] = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True}


def build(
    recipe: LinearRecipe,
    family: Mapping[str, Any] = LLAMA,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **sizes: Any,
) -> tuple[Transformer, SeedTable]:
    """A model with weights, its blocks under `recipe`, its head in BF16, and its seeds."""
    values = {"vocab_size": 64, "dim": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256, "max_seq_len": 64}
    model = Transformer(Architecture(**{**values, **family, **sizes}), dtype=dtype)
    model.init_weights(seed)
    apply_policy(model, {"blocks.*": recipe, "*": bf16.recipe()} if sizes.get("layers", 2) else {"*": bf16.recipe()})
    return model, SeedTable(seed, model.number_sites())


def by_day(names: Iterable[str]) -> list[Any]:
    """Parameters of a test that takes seconds a recipe: those of `BY_NIGHT`, and nvfp4's options, marked so."""
    nightly = (*BY_NIGHT, "nvfp4_lines")
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


def one_of_a_kind_by_day(names: Iterable[str], kinds: Collection[str] = KINDS) -> list[Any]:
    """Parameters of a test that compiles whole models, ten seconds and more a recipe: those of `kinds` by day."""
    return [name if name in kinds else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@dataclass(frozen=True)
class System:
    """The parts of a run that its recipe decides."""

    run: config.RunConfig
    model: Transformer
    seeds: SeedTable
    optimizer: CodedOptimizer
    precision: PrecisionSchedule


TINY = ("model.layers=2", "model.vocab_size=64", "model.max_seq_len=64", "data.seq_len=64")
TINY += ("micro_batch=16", "tokens_per_step=1024", "steps=150")


def composed(*overrides: str) -> config.RunConfig:
    """The run that a command line describes, a value of the caller's own: each command line is composed once."""
    return deepcopy(_composed(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> config.RunConfig:
    """Groups are composed once and copied, for that takes Hydra a tenth of a second; then values are set by Hydra."""
    groups, values = (tuple(each for each in overrides if _chooses(each) == of_group) for of_group in (True, False))
    run = deepcopy(_of_groups(groups))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), run)
    found = OmegaConf.to_object(run)
    assert isinstance(found, config.RunConfig)
    return found


@cache
def _of_groups(overrides: tuple[str, ...]) -> DictConfig:
    """Works inside and outside of another Hydra context."""
    config.register()
    if GlobalHydra.instance().is_initialized():
        return compose("train", overrides=list(overrides))
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def _chooses(override: str) -> bool:
    """Whether it names a file of a group, as `+recipe=fp8` does, and not a value."""
    return (config.directory() / re.split("[=@]", override.lstrip("+~"))[0]).is_dir()


def system(recipe: str, model: str = "llama_tiny", *overrides: str, seed: int = 0) -> System:
    """`+recipe=<recipe> model=<model>` at test size, with weights, at its first step, eager."""
    run = composed(f"+recipe={recipe}", f"model={model}", *TINY, *overrides)
    laid_out = parts.layout(run)
    seeds = parts.weights(laid_out.model, torch.device("cpu"), seed)
    optimizer = build_optimizer.optimizer(run, laid_out.model, dp=1)
    precision = PrecisionSchedule(laid_out.phases)
    precision.begin(laid_out.model, 0)
    return System(run, laid_out.model, seeds, optimizer, precision)
