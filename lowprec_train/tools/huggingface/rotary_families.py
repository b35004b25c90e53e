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
from lowprec_train.tools.huggingface.family import Family, Json, check_numbers, expect
from lowprec_train.tools.huggingface.rows import GroupedHeads, Interleaved, Rows, Same

ROTARY = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "max_seq_len",
}
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
        "num_key_value_heads": model.kv_heads,
        "head_dim": _head_dim(model),
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else dict(model.rope_scaling),
    }


def _llama_config(model: ModelConfig) -> dict[str, Any]:
    return _rotary_config(model) | {"attention_bias": model.bias, "mlp_bias": model.bias}


def _rotary_settings(config: Json) -> dict[str, Any]:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"config.json: layer_types = {config['layer_types']}, and this project computes full_attention only"
        )
    theta = _rope(config)[1].get("rope_theta", config.get("rope_theta", 10000.0))
    check_numbers({"rope_theta": theta}, int, float)
    return {
        "head_dim": None if head_dim * heads == dim else head_dim,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "tied": config.get("tie_word_embeddings", False),
        "rope_theta": float(theta),
        "rope_scaling": _rope_scaling(config),
        "norm_eps": float(config["rms_norm_eps"]),
    }


def _llama_settings(config: Json) -> dict[str, Any]:
    bias = config.get("attention_bias", False)
    expect(config, "mlp_bias", *((False, None) if not bias else (True,)), why=f"{bias}, the value of attention_bias,")
    return _rotary_settings(config) | {"bias": bias}


def _rope(config: Json) -> tuple[str, Json]:
    """Return the RoPE settings of a config.json: their key (`rope_parameters` in newer files) and their values."""
    newer, older = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, settings in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(settings, dict):
            raise ValueError(f"config.json: {key} = {settings!r} is not a table of rotary settings")
    if newer and older and newer != older:
        raise ValueError(f"config.json: rope_parameters = {newer} and rope_scaling = {older} are not the same")
    return ("rope_parameters", newer) if newer else ("rope_scaling", older)


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
    inner: Mapping[str, tuple[str, ...]] = INNER,
    written: Mapping[str, Any] | None = None,
    accepted: Mapping[str, tuple[Any, ...]] | None = None,
    required: tuple[str, ...] = (),
    to_config: Callable[[ModelConfig], dict[str, Any]] = _rotary_config,
    from_config: Callable[[Json], dict[str, Any]] = _rotary_settings,
    **choices: Any,
) -> Family:
    defaults = {"attention": "causal", "norm_placement": "pre", "qkv_bias": None}
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        choices=ROTARY | defaults | choices,
        sizes=SIZES,
        written={"hidden_act": "silu"} | dict(written or {}),
        accepted={"hidden_act": ("silu",)}
        | {key: (value, None) for key, value in (written or {}).items()}
        | dict(accepted or {}),
        required=required,
        to_config=to_config,
        from_config=from_config,
        outer={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
        block="model.layers.{}",
        inner=inner,
        rows=_rotary_rows,
    )


LLAMA = _rotary_family("llama", "LlamaForCausalLM", to_config=_llama_config, from_config=_llama_settings)
MISTRAL = _rotary_family(
    "mistral",
    "MistralForCausalLM",
    accepted={"sliding_window": (None,)},
    required=("sliding_window", "num_key_value_heads"),
    bias=False,
)
QWEN2 = _rotary_family(
    "qwen2",
    "Qwen2ForCausalLM",
    written={"use_sliding_window": False},
    required=("num_key_value_heads",),
    bias=False,
    qkv_bias=True,
)
QWEN3 = _rotary_family(
    "qwen3",
    "Qwen3ForCausalLM",
    inner=INNER | QK_NORM,
    written={"use_sliding_window": False, "attention_bias": False},
    required=("num_key_value_heads", "head_dim"),
    attention="qk_norm",
    bias=False,
)
OLMO2 = _rotary_family(
    "olmo2",
    "Olmo2ForCausalLM",
    inner=INNER | QK_NORM | POST_NORM,
    written={"attention_bias": False},
    attention="full_qk_norm",
    norm_placement="post",
    bias=False,
)
