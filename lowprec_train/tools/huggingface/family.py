"""A family of models of `transformers`, as data: what it calls our modules, and what its config.json says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowprec_train.config import ModelConfig
from lowprec_train.tools.huggingface.rows import Rows, Same

Json = Mapping[str, Any]
MAYBE_COUNTS = ("num_key_value_heads", "head_dim", "n_inner")  # sizes of config.json that may be null
REALS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")
SPECIAL_IDS = ("bos_token_id", "eos_token_id")  # of config.json: begin a text, end one; an id, a list of ids or null


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of `transformers`.

    choices: the values of ModelConfig that it fixes. counts: keys of config.json that hold sizes. outer: our module ->
    theirs, prefix and all. block: prefix of a block's modules, with its number. inner: our module of a block -> theirs,
    one or several. rows: our module and the model -> the layout. to_config, from_config: sizes to config.json and back.
    """

    model_type: str
    architecture: str
    prefix: str
    choices: Mapping[str, Any]
    counts: tuple[str, ...]
    outer: Mapping[str, str]
    block: str
    inner: Mapping[str, tuple[str, ...]]
    rows: Callable[[str, ModelConfig], Rows]
    to_config: Callable[[ModelConfig], dict[str, Any]]
    from_config: Callable[[Json], dict[str, Any]]

    def theirs(self, name: str) -> tuple[str, ...]:
        """The names that they give to our parameter."""
        module, _, kind = name.rpartition(".")
        if module in self.outer:
            return (f"{self.outer[module]}.{kind}",)
        number, inside = _in_block(module)
        return tuple(f"{self.block.format(number)}.{each}.{kind}" for each in self.inner[inside])

    def layout(self, name: str, model: ModelConfig) -> Rows:
        """The layout of our parameter in their tensors."""
        module = name.rpartition(".")[0]
        return Same() if module in self.outer else self.rows(_in_block(module)[1], model)

    def config(self, model: ModelConfig, *, dtype: torch.dtype, ids: Json) -> dict[str, Any]:
        """config.json. ids: the SPECIAL_IDS that are known."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            **self.to_config(model),
            "tie_word_embeddings": model.tied,
            **{key: ids.get(key) for key in SPECIAL_IDS},
            "torch_dtype": str(dtype).removeprefix("torch."),
            "use_cache": True,
        }

    def model(self, config: Json, name: str) -> ModelConfig:
        """Sizes of the model that config.json describes. Raises ValueError for what this project does not compute."""
        try:
            _check_numbers({key: config[key] for key in self.counts}, int)
            _check_numbers({key: config[key] for key in MAYBE_COUNTS if config.get(key) is not None}, int)
            _check_numbers({key: config[key] for key in REALS if key in config}, int, float)
            sizes = self.from_config(config)
            return ModelConfig(name=name, vocab_size=config["vocab_size"], **self.choices, **sizes)
        except KeyError as error:
            raise ValueError(f"config.json of a {self.model_type} model does not say {error}") from None


def _check_numbers(asked: Json, *kinds: type) -> None:
    for key, value in asked.items():
        if type(value) not in kinds or not 0 < value < math.inf:
            raise ValueError(f"config.json: {key} = {value!r} is not a positive number")


def _in_block(module: str) -> tuple[str, str]:
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    assert found, module
    return found[1], found[2]


def expect(config: Json, key: str, *allowed: Any, why: str = "") -> None:
    """ValueError unless a key of config.json has one of these values. why: in place of them, for people."""
    if config.get(key) not in allowed:
        wanted = why or " or ".join(repr(value) for value in allowed if value is not None)
        raise ValueError(f"config.json: {key} = {config.get(key)!r}, and this project computes {wanted} only")
