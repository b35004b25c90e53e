"""Families with RMSNorm, SwiGLU and RoPE.

llama     RoPE with or without the scaling of Llama 3.1; GQA, tied embeddings, biases and head_dim are optional
mistral   llama without biases; no sliding window; exported as llama
qwen2     llama with biases in q, k and v only
qwen3     llama with QK norm over each head
olmo2     llama with norms after attention and MLP, and QK norm over all heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowprec_train.config import ModelConfig
from lowprec_train.model.layers import ROPE_SCALINGS
from lowprec_train.tools.huggingface.family import Family, Json, expect
from lowprec_train.tools.huggingface.rows import GroupedHeads, Interleaved, Rows, Same

ROTARY = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
INNER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": QKV,
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
QK_NORM = {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)}
POST_NORM = {"attention_norm": ("post_attention_layernorm",), "mlp_norm": ("post_feedforward_layernorm",)}


def _rotary_rows(module: str, model: ModelConfig) -> Rows:
    if module == "attention.qkv":
        return GroupedHeads(queries=model.heads // model.kv_heads, head_dim=_head_dim(model))
    return Interleaved() if module == "mlp.gate_up" else Same()


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


def _rotary_sizes(config: Json, *required: str) -> dict[str, Any]:
    """Return the sizes in a config.json. required: keys that must be present, because the family's defaults differ from
    llama's.
    """
    for key in required:
        config[key]  # KeyError: `Family.model` reports the missing key
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
    expect(config, "mlp_bias", *((False, None) if not bias else (True,)), why=f"{bias}, the value of attention_bias,")
    return _rotary_sizes(config) | {"bias": bias}


def _mistral_sizes(config: Json) -> dict[str, Any]:
    expect(config, "sliding_window", None, why="null")
    return _rotary_sizes(config, "sliding_window", "num_key_value_heads") | {"bias": False}


def _full_attention(config: Json, *required: str) -> dict[str, Any]:
    expect(config, "use_sliding_window", False, None)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types = {config['layer_types']}, and this project computes full_attention only"
        )
    return _rotary_sizes(config, "num_key_value_heads", *required)


def _qwen3_sizes(config: Json) -> dict[str, Any]:
    expect(config, "attention_bias", False, None)
    return _full_attention(config, "head_dim")


def _olmo2_sizes(config: Json) -> dict[str, Any]:
    expect(config, "attention_bias", False, None)
    return _rotary_sizes(config)


def _rope(config: Json) -> tuple[str, Json]:
    """Return the RoPE settings of a config.json: their key (`rope_parameters` in newer files) and their values."""
    newer, older = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, settings in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(settings, dict):
            raise ValueError(f"config.json: {key} = {settings!r} is not a table of rotary settings")
    if newer and older and newer != older:
        raise ValueError(f"config.json: rope_parameters = {newer} and rope_scaling = {older} are not the same")
    return ("rope_parameters", newer) if newer else ("rope_scaling", older)


def _rope_theta(config: Json) -> float:
    """Return the RoPE base, which is in the RoPE settings of config.json or at its top level."""
    return float(_rope(config)[1].get("rope_theta", config.get("rope_theta", 10000.0)))


def _rope_scaling(config: Json) -> dict[str, Any] | None:
    """Return the RoPE scaling for ModelConfig; None for unscaled RoPE."""
    key, settings = _rope(config)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if settings.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", *ROPE_SCALINGS):
        known = " or ".join(ROPE_SCALINGS)
        raise ValueError(
            f"config.json: {key} = {dict(settings)} is not supported; rope_type must be default or {known}, "
            "and partial_rotary_factor 1"
        )
    if kind == "default":
        return None
    return {"rope_type": kind, **{name: settings[name] for name in ROPE_SCALINGS[kind]}}


def _rotary_family(
    model_type: str,
    architecture: str,
    *,
    to_config: Callable[[ModelConfig], dict[str, Any]],
    from_config: Callable[[Json], dict[str, Any]],
    inner: Mapping[str, tuple[str, ...]] = INNER,
    **choices: Any,
) -> Family:
    defaults = {"attention": "causal", "norm_placement": "pre", "qkv_bias": None}
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        choices=ROTARY | defaults | choices,
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
    inner=INNER | QK_NORM,
    attention="qk_norm",
    bias=False,
)
OLMO2 = _rotary_family(
    "olmo2",
    "Olmo2ForCausalLM",
    to_config=_olmo2_config,
    from_config=_olmo2_sizes,
    inner=INNER | QK_NORM | POST_NORM,
    attention="full_qk_norm",
    norm_placement="post",
    bias=False,
)
