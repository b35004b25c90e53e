"""Keys and values of the tokens that a model has seen, so that the next token costs one token and not all of them.

In a causal decoder the keys and values of a token do not depend on what comes after it. Generation therefore computes
each token once, leaves its keys and values here, and attends from the new tokens to all that are held:

    attention(t) = softmax(q_t [k_0 .. k_t]^T / sqrt(H)) [v_0 .. v_t]

The memory is taken at the start, for the longest sequence that will be held. Keys are held after the rotation, which
depends on their own position alone. Training never has one: without a cache the model's graph is what it was.

Shapes: L layers, B sequences, K key-value heads, T new tokens, S tokens held with them, M tokens at most, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's part; keys and values are views [B, K, M, H] of the whole, `length` tokens of them are there."""

    keys: Tensor
    values: Tensor
    length: int

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values behind those that are there; all of them, [B, K, S, H] each."""
        end = self.length + k_BKTH.shape[2]
        self.keys[:, :, self.length : end] = k_BKTH
        self.values[:, :, self.length : end] = v_BKTH
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """What `Transformer.hidden` takes and fills: `length` tokens of `batch` sequences so far, `tokens` at most.

    Bytes: 2 * layers * batch * kv_heads * tokens * head_dim * bytes of dtype.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        batch: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, batch, kv_heads, tokens, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def room(self) -> int:
        """Tokens that can be held in all."""
        return self.keys.shape[3]

    def layer(self, index: int) -> LayerCache:
        """The part of one layer, for the tokens that come next."""
        return LayerCache(self.keys[index], self.values[index], self.length)

    def mask(self, tokens: int) -> Tensor | None:
        """Which of the S tokens each of the next T sees: [1, 1, T, S] bool. None where attention knows without: all are
        new, or one is, which sees all.
        """
        if self.length == 0 or tokens == 1:
            return None
        all_TS = torch.ones(tokens, self.length + tokens, dtype=torch.bool, device=self.keys.device)
        return all_TS.tril(self.length)[None, None]

    def advance(self, tokens: int) -> None:
        """All layers have taken the next `tokens` tokens."""
        self.length += tokens
