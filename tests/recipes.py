"""Every recipe of this release with the values that tests hold it to, and a small model that carries one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.policy import apply_policy, attach_draws, count_linears
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.recipes import bf16, fp4, fp8, mxfp4, mxfp4_fp8

RECIPES: dict[str, LinearRecipe] = {
    "bf16": bf16.recipe(),
    "fp8": fp8.recipe(),
    "fp4": fp4.recipe(),
    "fp4_residual": fp4.recipe(outliers="residual"),
    "mxfp4": mxfp4.recipe(),
    "mxfp4_fp8": mxfp4_fp8.recipe(),
}
LLAMA: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "tied": False,
}
GPT: Mapping[str, Any] = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True}


def build(
    recipe: LinearRecipe, family: Mapping[str, Any] = LLAMA, *, seed: int = 0, **sizes: Any
) -> tuple[Transformer, Draws]:
    """A model with weights, its blocks under `recipe`, its head in BF16, and its draws."""
    values = {"vocab_size": 64, "dim": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256, "max_seq_len": 64}
    model = Transformer(**{**values, **family, **sizes})
    model.init_weights(seed)
    apply_policy(model, {"blocks.*": recipe, "*": bf16.recipe()} if sizes.get("layers", 2) else {"*": bf16.recipe()})
    draws = Draws(seed, count_linears(model))
    attach_draws(model, draws)
    return model, draws
