"""The supported model families of Hugging Face, and the family of a given model or config.json.

A config.json with a setting that this package does not compute (another RoPE scaling, another activation function, a
sliding window) is refused with the setting's value, because the imported model would compute other logits.
"""

from __future__ import annotations

from typing import Any

from lowprec_train.config import ModelConfig
from lowprec_train.tools.huggingface.family import Family, Json
from lowprec_train.tools.huggingface.rotary_families import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from lowprec_train.tools.huggingface.rows import GroupedHeads, Rows, Same, Transposed


def _gpt2_rows(module: str, model: ModelConfig) -> Rows:
    if module == "attention.qkv":
        return Transposed(GroupedHeads(queries=1, head_dim=model.dim // model.heads), parts=3)
    return Same() if module.endswith("norm") else Transposed(Same())


def _gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {"n_inner": model.ffn, "layer_norm_epsilon": model.norm_eps}


def _gpt2_settings(config: Json) -> dict[str, Any]:
    return {
        "kv_heads": config["n_head"],
        "ffn": config.get("n_inner") or 4 * config["n_embd"],
        "tied": config.get("tie_word_embeddings", True),
        "norm_eps": float(config["layer_norm_epsilon"]),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    choices={
        "attention": "causal",
        "norm_placement": "pre",
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "qkv_bias": None,
        "head_dim": None,
        "rope_scaling": None,
    },
    sizes={"n_embd": "dim", "n_layer": "layers", "n_head": "heads", "n_positions": "max_seq_len"},
    written={
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    accepted={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
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
    from_config=_gpt2_settings,
)

UNSUPPORTED = {  # feature -> the model_types that need it
    "a mixture of experts": ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"),
    "norms of weight 1 + w, scaled embeddings and sliding windows": ("gemma", "gemma2", "gemma3", "gemma3_text"),
    "rotation of a part of each head's channels": ("gpt_neox", "phi", "stablelm", "persimmon"),
    "fused projections and rotary frequencies of its own": ("phi3",),
    "state-space layers or linear attention": ("mamba", "mamba2", "jamba", "bamba", "qwen3_next", "nemotron_h"),
    "a chunked or windowed attention": ("llama4", "cohere2", "olmo3"),
}
FAMILIES = (LLAMA, QWEN2, QWEN3, OLMO2, MISTRAL, GPT2)


def family_of(model: ModelConfig) -> Family:
    """Return the family to which a model is exported. Raises ValueError with the settings that each family lacks."""
    reasons = []
    for family in FAMILIES:
        lacking = [
            f"{key}={getattr(model, key)}" for key, value in family.choices.items() if getattr(model, key) != value
        ]
        if family is GPT2 and model.kv_heads != model.heads:
            lacking.append(f"kv_heads={model.kv_heads} of {model.heads} heads")
        if not lacking:
            return family
        reasons.append(f"{family.model_type} has no {', '.join(lacking)}")
    raise ValueError(f"no Hugging Face architecture computes model {model.name}: {'; '.join(reasons)}")


def family_named(config: Json) -> Family:
    """Return the family of a config.json. Raises ValueError for an unsupported model_type and for quantised weights."""
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            if config.get("quantization_config"):
                raise ValueError("config.json has a quantization_config; import weights in BF16, FP16 or FP32")
            return family
    kind = config.get("model_type")
    for feature, kinds in UNSUPPORTED.items():
        if kind in kinds:
            raise ValueError(f"config.json: model_type = {kind!r} needs {feature}, which this project does not compute")
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"config.json: model_type = {kind!r} is not supported; supported are {known}")
