"""A small LLaMA and a small GPT, built by name with any change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer

SIZES = {"vocab_size": 61, "dim": 64, "layers": 2, "heads": 4, "ffn": 96, "max_seq_len": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "kv_heads": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        "bias": False,
        "tied": False,
    },
    "gpt": {
        "kv_heads": 4,
        "norm": "layernorm",
        "activation": "gelu",
        "positions": "learned",
        "bias": True,
        "tied": True,
    },
}


@pytest.fixture
def build() -> Callable[..., Transformer]:
    """build(family, **changes) -> Transformer with larger than usual weights, so that every part shows in the loss."""

    def make(family: str, *, loud: bool = True, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Transformer:
        model = Transformer(Architecture(**(SIZES | FAMILIES[family] | changes)), dtype=dtype)
        model.init_weights(7)
        if loud:
            generator = torch.Generator().manual_seed(11)
            for parameter in model.parameters():
                parameter.data.add_(torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator))
        return model

    return make


@pytest.fixture
def batch() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """batch(sequences, length) -> tokens and targets, some of them ignored."""

    def make(sequences: int = 3, length: int = 24, vocab: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, vocab, (sequences, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, ::5] = -100
        return tokens[:, :-1].contiguous(), targets

    return make
