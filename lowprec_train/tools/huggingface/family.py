"""A model family of Hugging Face: its module names, its weight layouts and the keys of its config.json."""

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
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "n_inner")  # sizes in config.json that may be null
REALS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
SPECIAL_IDS = ("bos_token_id", "eos_token_id")  # keys of config.json; each an id, a list of ids or null


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of Hugging Face.

    prefix: of the base model's parameter names. choices: settings of ModelConfig that every model of the family has.
    sizes: key of config.json -> setting of ModelConfig. written: keys of config.json with the same value for every
    model. accepted: key -> the values with which a model is imported, None if it may be absent. required: further keys
    that must be present, because the family's defaults differ from llama's. to_config, from_config: the other settings,
    to config.json and back. outer: module of this package -> full name of the Hugging Face module, outside the blocks.
    block: name of block `{}`. inner: as `outer`, for modules in a block; one module may become several. rows: module
    and model -> layout of its tensors.
    """

    model_type: str
    architecture: str
    prefix: str
    choices: Mapping[str, Any]
    sizes: Mapping[str, str]
    outer: Mapping[str, str]
    block: str
    inner: Mapping[str, tuple[str, ...]]
    rows: Callable[[str, ModelConfig], Rows]
    to_config: Callable[[ModelConfig], dict[str, Any]]
    from_config: Callable[[Json], dict[str, Any]]
    written: Mapping[str, Any]
    accepted: Mapping[str, tuple[Any, ...]]
    required: tuple[str, ...] = ()

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the Hugging Face parameters that contain a parameter of this package."""
        module, _, kind = name.rpartition(".")
        if module in self.outer:
            return (f"{self.outer[module]}.{kind}",)
        number, inside = _in_block(module)
        return tuple(f"{self.block.format(number)}.{each}.{kind}" for each in self.inner[inside])

    def layout(self, name: str, model: ModelConfig) -> Rows:
        """Return the layout of a parameter of this package in the Hugging Face tensors."""
        module = name.rpartition(".")[0]
        return Same() if module in self.outer else self.rows(_in_block(module)[1], model)

    def config(self, model: ModelConfig, *, dtype: torch.dtype, ids: Json) -> dict[str, Any]:
        """Return the content of config.json. dtype: of the tensors. ids: values of SPECIAL_IDS; null if absent."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            **{key: getattr(model, setting) for key, setting in self.sizes.items()},
            **self.written,
            **self.to_config(model),
            "tie_word_embeddings": model.tied,
            **{key: ids.get(key) for key in SPECIAL_IDS},
            "torch_dtype": str(dtype).removeprefix("torch."),
            "use_cache": True,
        }

    def model(self, config: Json, name: str) -> ModelConfig:
        """Return the model of a config.json. Raises ValueError for a setting that this project does not compute."""
        try:
            check_numbers({key: config[key] for key in ("vocab_size", *self.sizes)}, int)
            check_numbers({key: config[key] for key in OPTIONAL_COUNTS if config.get(key) is not None}, int)
            check_numbers({key: config[key] for key in REALS if key in config}, int, float)
            _check_flags(config)
            for key, allowed in self.accepted.items():
                expect(config, key, *allowed)
            if missing := [key for key in self.required if key not in config]:
                raise KeyError(missing[0])
            sizes = {setting: config[key] for key, setting in self.sizes.items()} | self.from_config(config)
            return ModelConfig(name=name, vocab_size=config["vocab_size"], **self.choices, **sizes)
        except KeyError as error:
            raise ValueError(f"config.json of a {self.model_type} model lacks the key {error}") from None


def check_numbers(values: Json, *kinds: type) -> None:
    """Raise ValueError unless the values of config.json are positive numbers of these types."""
    for key, value in values.items():
        if type(value) not in kinds or not 0 < value < math.inf:
            raise ValueError(f"config.json: {key} = {value!r} is not a positive number")


def _check_flags(config: Json) -> None:
    for key in FLAGS:
        if not isinstance(config.get(key), bool | None):
            raise ValueError(f"config.json: {key} = {config[key]!r} is neither true nor false")


def _in_block(module: str) -> tuple[str, str]:
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    assert found, module
    return found[1], found[2]


def expect(config: Json, key: str, *allowed: Any, why: str = "") -> None:
    """Raise ValueError unless a key of config.json has one of the allowed values. why: names them in the error."""
    if config.get(key) not in allowed:
        wanted = why or " or ".join(repr(value) for value in allowed if value is not None) or "null"
        raise ValueError(f"config.json: {key} = {config.get(key)!r}, and this project computes {wanted} only")
