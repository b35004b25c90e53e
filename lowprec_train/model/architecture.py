"""Sizes and options of a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and options of a decoder; `configs/model` has the published models.

    vocab_size, dim, layers, heads, ffn: the usual sizes. head_dim: channels of a head; None: dim / heads.
    kv_heads: key-value heads, each shared by heads / kv_heads query heads (arXiv 2305.13245).
    max_seq_len: longest sequence.
    norm: "rmsnorm" | "layernorm".  activation: "swiglu" | "gelu".  positions: "rotary" | "learned".
    attention: "causal" | "qk_norm" | "full_qk_norm", see `model.attention`.  Each of these four may also be
        `module.Class`, a class with the same constructor and forward (docs/adding_a_model.md).
    norm_backend: "own" | "apex"; with "apex" NVIDIA's library computes the norms of blocks and the last norm.
    norm_placement: "pre", before attention and feed-forward network, or "post", after them and before the residual sum
        (arXiv 2501.00656).
    bias: of every linear layer but the head, and of layernorm.  qkv_bias: of queries, keys and values; None: as bias.
    tied: the head uses the embedding's weight.
    rope_theta: base of the rotary frequencies; unused when positions are learned.
    rope_scaling: scaling of these frequencies, see `layers.scaled_frequencies`; None: none.
    recompute: "none" | "norms" | "selective" | "full", see `model.recompute`.
    recompute_layers: `recompute` is for the first N blocks alone; None: for all.
    full_recompute_layers: the first N blocks are recomputed as with "full", the others as the above say.
    offload: keep inputs of blocks in host memory between the passes, see `model.offload`; needs recompute "full".
    loss_chunk: number of tokens whose logits exist at a time, see `model.head`; None: all of a micro-batch.

    Raises ValueError for sizes that do not divide, for offload without recompute "full" in all blocks, for
    recompute_layers without recompute, for recompute_layers and full_recompute_layers beyond the number of blocks, and
    for a loss_chunk, rope_theta or norm_eps that is not a positive number.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    max_seq_len: int
    norm: str
    activation: str
    positions: str
    bias: bool
    tied: bool
    attention: str = "causal"
    norm_placement: str = "pre"
    norm_backend: str = "own"
    head_dim: int | None = None
    qkv_bias: bool | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    norm_eps: float = 1e-5
    recompute: str = "none"
    recompute_layers: int | None = None
    full_recompute_layers: int = 0
    offload: bool = False
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.offload and self.recompute != "full":
            raise ValueError(
                f"model.offload=true needs model.recompute=full, not {self.recompute}: only block inputs are offloaded"
            )
        if self.offload and self.recompute_layers is not None:
            raise ValueError(
                f"model.recompute_layers={self.recompute_layers} cannot be used with model.offload=true, which needs "
                "model.recompute=full in all blocks"
            )
        if self.recompute == "none" and self.recompute_layers is not None:
            raise ValueError(f"model.recompute_layers={self.recompute_layers} needs model.recompute, which is none")
        for name in ("recompute_layers", "full_recompute_layers"):
            blocks = getattr(self, name)
            if blocks is not None and not 0 <= blocks <= self.layers:
                raise ValueError(f"model.{name}={blocks} must be between 0 and the {self.layers} blocks of the model")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be a number of tokens above 0, or null")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name}={value} must be a number above 0")
        whole = self.head_dim is not None or self.dim % self.heads == 0
        if not whole or self.heads % self.kv_heads or self.head_width % 8 or self.head_width < 8:
            width = self.dim / self.heads if self.head_dim is None else self.head_dim
            raise ValueError(
                f"dim {self.dim}, heads {self.heads}, kv_heads {self.kv_heads}, head_dim {self.head_dim}: heads must "
                f"divide dim where there is no head_dim, kv_heads must divide heads, and the head width {width:g} must "
                "be a positive multiple of 8"
            )

    @property
    def recompute_by_block(self) -> tuple[str, ...]:
        """`recompute` of each block."""
        whole, some = self.full_recompute_layers, self.recompute_layers
        some = self.layers if some is None else some
        middle = max(some - whole, 0)
        return ("full",) * whole + (self.recompute,) * middle + ("none",) * (self.layers - whole - middle)

    @property
    def head_width(self) -> int:
        """Number of channels of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim
