"""Key-value cache for generation.

In a causal decoder the keys and values of a token do not depend on later tokens. Generation therefore computes each
token once, stores its keys and values, and attends from the new tokens to all stored ones:

    attention(t) = softmax(q_t [k_0 .. k_t]^T / sqrt(H)) [v_0 .. v_t]

Memory for the longest sequence is allocated at the start. Keys are stored after the rotation, which depends only on
their position. Training does not use a cache, and without one the graph of the model is unchanged.

Shapes: L layers, B sequences, K key-value heads, T new tokens, S tokens held with them, M tokens at most, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer: views [B, K, M, H] of the whole cache, filled with `length` tokens."""

    keys: Tensor
    values: Tensor
    length: int

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all stored ones, [B, K, S, H] each."""
        end = self.length + k_BKTH.shape[2]
        self.keys[:, :, self.length : end] = k_BKTH
        self.values[:, :, self.length : end] = v_BKTH
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """Cache for `Transformer.hidden`: `length` tokens of `batch` sequences are stored, at most `tokens`.

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
        """Maximum number of tokens."""
        return self.keys.shape[3]

    def layer(self, index: int) -> LayerCache:
        """Return the cache of one layer for the next tokens."""
        return LayerCache(self.keys[index], self.values[index], self.length)

    def mask(self, tokens: int) -> Tensor | None:
        """Return which of the S tokens each of the next T attends to: [1, 1, T, S] bool. None if no mask is needed: all
        tokens are new, or only one is.
        """
        if self.length == 0 or tokens == 1:
            return None
        all_TS = torch.ones(tokens, self.length + tokens, dtype=torch.bool, device=self.keys.device)
        return all_TS.tril(self.length)[None, None]

    def advance(self, tokens: int) -> None:
        """Call after all layers have stored the next `tokens` tokens."""
        self.length += tokens
