"""Small models of both families as a run leaves them and as `transformers` saves them, with weights that tell mistakes.

Norms and biases are drawn too: at their first values, ones and zeros, one could stand for another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lowprec_train.config import ModelConfig
from lowprec_train.model.transformer import Transformer
from lowprec_train.train.checkpoint import Checkpointer, ModelState
from lowprec_train.train.weights import Weights, architecture, fill_from

SIZES = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 8, "kv_heads": 2, "ffn": 96, "max_seq_len": 48}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False}
GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True, "kv_heads": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
MODELS: Mapping[str, ModelConfig] = {
    "llama": ModelConfig(name="llama", **SIZES, **LLAMA, rope_theta=500.0, norm_eps=1e-6),
    "llama tied, with biases": ModelConfig(name="llama", **SIZES, **LLAMA | {"tied": True, "bias": True}),
    "llama 3.1": ModelConfig(name="llama3", **SIZES, **LLAMA, rope_theta=500.0, rope_scaling=LLAMA3),
    "llama, wide heads": ModelConfig(name="llama", **SIZES, **LLAMA, head_dim=16),
    "qwen 2": ModelConfig(name="qwen2", **SIZES, **LLAMA | {"tied": True}, qkv_bias=True),
    "qwen 3": ModelConfig(name="qwen3", **SIZES, **LLAMA, attention="qk_norm", head_dim=16, norm_eps=1e-6),
    "olmo 2": ModelConfig(name="olmo2", **SIZES, **LLAMA, attention="full_qk_norm", norm_placement="post"),
    "gpt": ModelConfig(name="gpt", **SIZES | GPT),
    "gpt untied": ModelConfig(name="gpt", **SIZES | GPT | {"tied": False}, norm_eps=1e-3),
}
STEP = 12


def transformer(sizes: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(architecture(sizes), dtype=dtype)


def drawn(sizes: ModelConfig, seed: int = 1) -> Transformer:
    """A model whose logits have a spread of 1.5 and whose numbers all differ."""
    model, generator = transformer(sizes), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(0, 0.2, generator=generator)
            parameter.copy_(noise + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


def save_run(path: Path, model: Transformer, sizes: ModelConfig, **facts: Any) -> Path:
    """A run directory with a checkpoint of `model`."""
    saver = Checkpointer(path / "checkpoints", interval=1, keep=9)
    saver.save({"model": ModelState(model)}, STEP, wait=True)
    OmegaConf.save(OmegaConf.create({"name": path.name, "model": asdict(sizes)}), path / "config.yaml")
    (path / "run.json").write_text(json.dumps({"name": path.name, **facts}))
    return path


def logits_of(weights: Weights, tokens: Tensor) -> Tensor:
    """Our logits in FP32."""
    model = transformer(weights.model)
    model.init_weights(0, fill_from(weights))
    with torch.no_grad():
        return model.logits(tokens)


def same(one: Weights, other: Weights) -> bool:
    """Equal sizes, names, dtypes and bits."""
    return (
        asdict(one.model) | {"name": ""} == asdict(other.model) | {"name": ""}
        and one.names() == other.names()
        and all(one.dtype(name) == other.dtype(name) for name in one.names())
        and all(torch.equal(one.read(name), other.read(name)) for name in one.names())
    )
