"""The two families of models that are exchanged, as data: what each calls our modules, and what its config.json says.

    llama   LlamaForCausalLM   rmsnorm, swiglu, rotary positions; grouped queries, tied or not, with biases or without
    gpt2    GPT2LMHeadModel    layernorm, gelu (tanh), learned positions, biases; as many key-value heads as heads

A config.json that asks for more than the model here computes (scaled rotary frequencies, an activation of another kind,
heads of a width of their own) is refused with the value that it has: a model that opens and computes something else is
worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowprec_train.config import ModelConfig
from lowprec_train.tools.huggingface.rows import Alternating, GroupedHeads, Rows, Same, Transposed

Json = Mapping[str, Any]
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
            for key in self.counts:
                if not (isinstance(config[key], int) and config[key] > 0):
                    raise ValueError(f"config.json: {key} = {config[key]!r} is not a positive number")
            sizes = self.from_config(config)
            return ModelConfig(name=name, vocab_size=config["vocab_size"], **self.choices, **sizes)
        except KeyError as error:
            raise ValueError(f"config.json of a {self.model_type} model does not say {error}") from None


def _in_block(module: str) -> tuple[str, str]:
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    assert found, module
    return found[1], found[2]


# --- LLaMA ------------------------------------------------------------------------------------------------------------


def _llama_rows(module: str, model: ModelConfig) -> Rows:
    if module == "attention.qkv":
        return GroupedHeads(queries=model.heads // model.kv_heads, head_dim=model.dim // model.heads)
    return Alternating() if module == "mlp.gate_up" else Same()


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": model.dim,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.dim // model.heads,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
    }


def _llama_sizes(config: Json) -> dict[str, Any]:
    dim, heads, bias = config["hidden_size"], config["num_attention_heads"], config.get("attention_bias", False)
    _expect(config, "hidden_act", "silu")
    _expect(config, "head_dim", None, dim // heads, why=f"= hidden_size / num_attention_heads = {dim} / {heads}")
    _expect(config, "mlp_bias", *((False, None) if not bias else (True,)), why="as attention_bias")
    return {
        "dim": dim,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "ffn": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "bias": bias,
        "tied": config.get("tie_word_embeddings", False),
        "rope_theta": _rope_theta(config),
        "norm_eps": float(config["rms_norm_eps"]),
    }


def _rope_theta(config: Json) -> float:
    """The base of the rotary frequencies: beside the other sizes, or in the `rope_parameters` of newer files."""
    newer: Json = config.get("rope_parameters") or {}
    scaling: Json = config.get("rope_scaling") or {}
    for key, asked in (("rope_parameters", newer), ("rope_scaling", scaling)):
        kind = asked.get("rope_type", asked.get("type", "default"))
        if kind != "default" or asked.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"config.json: {key} = {dict(asked)} scales the rotary frequencies, which this model does not"
            )
    return float(newer.get("rope_theta", config.get("rope_theta", 10000.0)))


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    choices={"attention": "causal", "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"},
    counts=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    outer={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    block="model.layers.{}",
    inner={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    rows=_llama_rows,
    to_config=_llama_config,
    from_config=_llama_sizes,
)


# --- GPT --------------------------------------------------------------------------------------------------------------


def _gpt2_rows(module: str, model: ModelConfig) -> Rows:
    if module == "attention.qkv":
        return Transposed(GroupedHeads(queries=1, head_dim=model.dim // model.heads), parts=3)
    return Same() if module.endswith("norm") else Transposed(Same())


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.dim,
        "n_inner": model.ffn,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _gpt2_sizes(config: Json) -> dict[str, Any]:
    _expect(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", None)
    _expect(config, "scale_attn_weights", True, None)
    _expect(config, "scale_attn_by_inverse_layer_idx", False, None)
    _expect(config, "add_cross_attention", False, None)
    return {
        "dim": config["n_embd"],
        "layers": config["n_layer"],
        "heads": config["n_head"],
        "kv_heads": config["n_head"],
        "ffn": config.get("n_inner") or 4 * config["n_embd"],
        "max_seq_len": config["n_positions"],
        "tied": config.get("tie_word_embeddings", True),
        "norm_eps": float(config["layer_norm_epsilon"]),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    choices={"attention": "causal", "norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    counts=("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"),
    outer={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    block="transformer.h.{}",
    inner={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    rows=_gpt2_rows,
    to_config=_gpt2_config,
    from_config=_gpt2_sizes,
)

FAMILIES = (LLAMA, GPT2)


def family_of(model: ModelConfig) -> Family:
    """The family that a model of ours can be exported to. Raises ValueError, with what keeps it from each."""
    reasons = []
    for family in FAMILIES:
        wrong = [
            f"{key}={getattr(model, key)}" for key, value in family.choices.items() if getattr(model, key) != value
        ]
        if family is GPT2 and model.kv_heads != model.heads:
            wrong.append(f"kv_heads={model.kv_heads} of {model.heads} heads")
        if not wrong:
            return family
        reasons.append(f"{family.model_type} has no {', '.join(wrong)}")
    raise ValueError(f"model {model.name} has no form in transformers: {'; '.join(reasons)}")


def family_named(config: Json) -> Family:
    """The family of a config.json. Raises ValueError for another one, and for quantised weights."""
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            if config.get("quantization_config"):
                raise ValueError("config.json: has a quantization_config, and weights must be BF16, FP16 or FP32")
            return family
    known = " or ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"config.json: model_type = {config.get('model_type')!r}, and only {known} can be imported")


def _expect(config: Json, key: str, *allowed: Any, why: str = "") -> None:
    if config.get(key) not in allowed:
        wanted = why or " or ".join(repr(value) for value in allowed if value is not None)
        raise ValueError(f"config.json: {key} = {config.get(key)!r}, and this project computes {wanted} only")
