"""The peers: plain PyTorch, torchao's float8 training and TransformerEngine on the same LLaMA model.

Each has its fastest settings: blocks compiled one by one, or the whole model; last norm, head and loss compiled; cuDNN
attention if available. A missing package gives a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train import nvidia
from lowprec_train.model.attention import scaled_dot_product
from lowprec_train.precision.transformer_engine import NAMES, TransformerEngine
from lowprec_train.tools.bench.contestant import Built, Contestant, Work, first_values
from lowprec_train.tools.bench.ours import LINEAR

EPS, THETA = 1e-5, 10000.0


class PlainBlock(nn.Module):
    """Pre-norm LLaMA block."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=EPS), nn.RMSNorm(dim, eps=EPS)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * ffn, bias=False), nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Tail(nn.Module):
    """Last norm, head and mean cross-entropy."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(dim, eps=EPS), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Plain(nn.Module):
    """LLaMA with torch.nn only; its forward pass returns the loss."""

    def __init__(self, *, vocab_size: int, dim: int, layers: int, heads: int, ffn: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, ffn) for _ in range(layers))
        self.tail = Tail(dim, vocab_size)
        half = dim // heads // 2
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(seq_len, half))
        self.register_buffer("sin", torch.empty(seq_len, half))
        self.reset_angles()

    def reset_angles(self) -> None:
        """Fill the rotary tables: needed after `to_empty`."""
        seq_len, half = self.cos.shape
        angles = torch.outer(torch.arange(seq_len), THETA ** (-torch.arange(half) / half))
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.tail(x, targets)


def plain(work: Work, *, whole: bool = False, convert: Callable[[Plain], None] | None = None) -> Built:
    """Build the plain model. whole: compile one graph, else one per block and one for the tail. convert: replaces its
    linear layers.
    """
    with work.device:
        model = Plain(**work.sizes, seq_len=work.seq_len)
    first_values((p for p in model.parameters() if p.ndim >= 2), work.seed)
    if convert is not None:
        convert(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(work.dtype)
    if work.compiled:
        for module in [model] if whole else [*model.blocks, model.tail]:
            module.compile()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(work.device.type, torch.bfloat16):
            return model(tokens, targets)

    return Built(module=model, loss=loss)


def torchao(work: Work, *, recipe: str, whole: bool = False, head: bool = False) -> Built:
    """Build the model with torchao's float8 training. recipe: `tensorwise` or `rowwise`. head: in FP8 too."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convert(model: Plain) -> None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: head or "head" not in name)

    return plain(work, whole=whole, convert=convert)


class TransformerEngineModel(nn.Module):
    """Layers of te.TransformerLayer with an embedding and the same tail."""

    def __init__(self, work: Work, backend: TransformerEngine | None) -> None:
        te = nvidia.transformer_engine()
        from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

        super().__init__()
        sizes, dtype, device = work.sizes, work.dtype, work.device
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False}
        options |= {"self_attn_mask_type": "causal", "attn_input_format": "bshd", "fuse_qkv_params": True}
        options |= {"normalization": "RMSNorm", "activation": "swiglu", "layernorm_epsilon": EPS}
        with device:
            self.embedding = nn.Embedding(sizes["vocab_size"], sizes["dim"], dtype=dtype)
            self.tail = Tail(sizes["dim"], sizes["vocab_size"]).to(dtype)
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                sizes["dim"], sizes["ffn"], sizes["heads"], params_dtype=dtype, device=device, **options
            )
            for _ in range(sizes["layers"])
        )
        self.angles = RotaryPositionEmbedding(sizes["dim"] // sizes["heads"])(work.seq_len).to(device)
        self.around_pass = nullcontext if backend is None else backend.around_pass

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).bfloat16()
        with self.around_pass():
            for block in self.blocks:
                x = block(x, rotary_pos_emb=self.angles)
        return self.tail(x, targets)


def transformer_engine(work: Work, *, scaling: str | None) -> Built:
    """scaling: of `precision.transformer_engine`; None is BF16."""
    backend = None if scaling is None else TransformerEngine(scaling=scaling)
    if backend is not None:
        backend.check_machine(work.device)
    model = TransformerEngineModel(work, backend)
    first_values((model.embedding.weight, model.tail.head.weight), work.seed)
    if work.compiled:
        model.tail.compile()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(work.device.type, torch.bfloat16, enabled=work.parameters == "fp32"):
            return model(tokens, targets)

    return Built(module=model, loss=loss)


def _torchao(name: str, **options: Any) -> Contestant:
    return Contestant(name=f"torchao {name}", build=partial(torchao, **options), needs="torchao")


def _te(scaling: str | None) -> Contestant:
    """Return a contestant of TransformerEngine. It is `apart`: it does not load with torch's cuDNN attention in use."""
    name = f"TE {'bf16' if scaling is None else NAMES[scaling]}"
    build, needs = partial(transformer_engine, scaling=scaling), "transformer_engine"
    return Contestant(name=name, build=build, baseline=scaling is None, needs=needs, apart=True)


def chosen(texts: Iterable[str]) -> list[Contestant]:
    """Return the contestants of families (`torchao`) or variants (`torchao:rowwise`). Raises ValueError for an unknown
    one.
    """
    found: dict[Contestant, None] = {}
    for text in texts:
        family, _, part = text.partition(":")
        matching = [each for each in PEERS.get(family, ()) if part in each.name]
        if not matching:
            known = ", ".join(each.name for each in PEERS.get(family, ())) or ", ".join(PEERS)
            raise ValueError(f"no peer {text!r}; there are {known}")
        found |= dict.fromkeys(matching)
    return list(found)


PEERS: dict[str, tuple[Contestant, ...]] = {
    "linear": (LINEAR,),
    "plain": (
        Contestant(name="plain bf16", build=plain, baseline=True),
        Contestant(name="plain bf16 (whole model)", build=partial(plain, whole=True), baseline=True),
    ),
    "torchao": (
        _torchao("tensorwise", recipe="tensorwise"),
        _torchao("tensorwise (whole model)", recipe="tensorwise", whole=True),
        _torchao("tensorwise (whole model, fp8 head)", recipe="tensorwise", whole=True, head=True),
        _torchao("rowwise", recipe="rowwise"),
    ),
    "te": (*map(_te, (None, "delayed", "current", "block")),),
}
