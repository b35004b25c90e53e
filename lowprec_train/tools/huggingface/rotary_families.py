"""LLaMA and its kin: rmsnorm, swiglu and rotary positions, with what sets each family apart.

llama     rotary frequencies scaled as in Llama 3.1 or not; grouped queries, tied or not, with biases or without,
          heads of any width
mistral   the same without biases and without a sliding window; exported as llama
qwen2     as llama, with biases of queries, keys and values alone
qwen3     as llama, queries and keys normalised over each head
olmo2     as llama, norms behind attention and feed-forward net; queries and keys normalised over all heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowprec_train.config import ModelConfig
from lowprec_train.model.layers import ROPE_SCALINGS
from lowprec_train.tools.huggingface.family import Family, Json, expect
from lowprec_train.tools.huggingface.rows import Alternating, GroupedHeads, Rows, Same

ROTARY = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
INNER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": QKV,
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
NORMED = {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)}
BEHIND = {"attention_norm": ("post_attention_layernorm",), "mlp_norm": ("post_feedforward_layernorm",)}


def _rotary_rows(module: str, model: ModelConfig) -> Rows:
    if module == "attention.qkv":
        return GroupedHeads(queries=model.heads // model.kv_heads, head_dim=_head_dim(model))
    return Alternating() if module == "mlp.gate_up" else Same()


def _head_dim(model: ModelConfig) -> int:
    return model.dim // model.heads if model.head_dim is None else model.head_dim


def _rotary_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": model.dim,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": _head_dim(model),
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else dict(model.rope_scaling),
    }


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    return _rotary_config(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _without_window(model: ModelConfig) -> dict[str, Any]:
    return _rotary_config(model) | {"use_sliding_window": False}


def _qwen3_config(model: ModelConfig) -> dict[str, Any]:
    return _without_window(model) | {"attention_bias": False}


def _olmo2_config(model: ModelConfig) -> dict[str, Any]:
    return _rotary_config(model) | {"attention_bias": False}


def _rotary_sizes(config: Json, *named: str) -> dict[str, Any]:
    """named: keys whose default in this family is another than a LLaMA's, so config.json has to say them."""
    for key in named:
        config[key]  # KeyError: `Family.model` says that it is missing
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    expect(config, "hidden_act", "silu")
    head_dim = config.get("head_dim") or dim // heads
    return {
        "dim": dim,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "head_dim": None if head_dim * heads == dim else head_dim,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "ffn": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "tied": config.get("tie_word_embeddings", False),
        "rope_theta": _rope_theta(config),
        "rope_scaling": _rope_scaling(config),
        "norm_eps": float(config["rms_norm_eps"]),
    }


def _llama_sizes(config: Json) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    expect(config, "mlp_bias", *((False, None) if not bias else (True,)), why="as attention_bias")
    return _rotary_sizes(config) | {"bias": bias}


def _mistral_sizes(config: Json) -> dict[str, Any]:
    expect(config, "sliding_window", None, why="null")
    return _rotary_sizes(config, "sliding_window", "num_key_value_heads") | {"bias": False}


def _full_attention(config: Json, *named: str) -> dict[str, Any]:
    expect(config, "use_sliding_window", False, None)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types = {config['layer_types']}, and this project computes full_attention"
        )
    return _rotary_sizes(config, "num_key_value_heads", *named)


def _qwen3_sizes(config: Json) -> dict[str, Any]:
    expect(config, "attention_bias", False, None)
    return _full_attention(config, "head_dim")


def _olmo2_sizes(config: Json) -> dict[str, Any]:
    expect(config, "attention_bias", False, None)
    return _rotary_sizes(config)


def _rope(config: Json) -> tuple[str, Json]:
    """The rotary settings of a config.json: their key, `rope_parameters` in newer files, and themselves."""
    newer, older = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, asked in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(asked, dict):
            raise ValueError(f"config.json: {key} = {asked!r} is not a table of rotary settings")
    if newer and older and newer != older:
        raise ValueError(f"config.json: rope_parameters = {newer} and rope_scaling = {older} are not the same")
    return ("rope_parameters", newer) if newer else ("rope_scaling", older)


def _rope_theta(config: Json) -> float:
    """The base of the rotary frequencies: beside the other sizes, or among the rotary settings."""
    return float(_rope(config)[1].get("rope_theta", config.get("rope_theta", 10000.0)))


def _rope_scaling(config: Json) -> dict[str, Any] | None:
    """How the rotary frequencies are scaled, as our models take it; None where they are not."""
    key, asked = _rope(config)
    kind = asked.get("rope_type", asked.get("type", "default"))
    if asked.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", *ROPE_SCALINGS):
        known = " or ".join(ROPE_SCALINGS)
        raise ValueError(
            f"config.json: {key} = {dict(asked)} scales the rotary frequencies in a way that this model does not: "
            f"{known} only"
        )
    if kind == "default":
        return None
    return {"rope_type": kind, **{name: asked[name] for name in ROPE_SCALINGS[kind]}}


def _rotary_family(
    model_type: str,
    architecture: str,
    *,
    to_config: Callable[[ModelConfig], dict[str, Any]],
    from_config: Callable[[Json], dict[str, Any]],
    inner: Mapping[str, tuple[str, ...]] = INNER,
    **choices: Any,
) -> Family:
    usual = {"attention": "causal", "norm_placement": "pre", "qkv_bias": None}
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        choices=ROTARY | usual | choices,
        counts=COUNTS,
        outer={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
        block="model.layers.{}",
        inner=inner,
        rows=_rotary_rows,
        to_config=to_config,
        from_config=from_config,
    )


LLAMA = _rotary_family("llama", "LlamaForCausalLM", to_config=_llama_config, from_config=_llama_sizes)
MISTRAL = _rotary_family("mistral", "MistralForCausalLM", to_config=_rotary_config, from_config=_mistral_sizes)
QWEN2 = _rotary_family(
    "qwen2",
    "Qwen2ForCausalLM",
    to_config=_without_window,
    from_config=_full_attention,
    bias=False,
    qkv_bias=True,
)
QWEN3 = _rotary_family(
    "qwen3",
    "Qwen3ForCausalLM",
    to_config=_qwen3_config,
    from_config=_qwen3_sizes,
    inner=INNER | NORMED,
    attention="qk_norm",
    bias=False,
)
OLMO2 = _rotary_family(
    "olmo2",
    "Olmo2ForCausalLM",
    to_config=_olmo2_config,
    from_config=_olmo2_sizes,
    inner=INNER | NORMED | BEHIND,
    attention="full_qk_norm",
    norm_placement="post",
    bias=False,
)
