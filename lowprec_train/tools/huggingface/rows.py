"""Row layouts: how a fused weight of this package maps to Hugging Face weights, and back.

`split` turns a weight of this package into Hugging Face weights, `join` is its inverse. Both only move elements, so a
round trip is bit-exact. They take weights [N, D], biases [N] and meta tensors (for shapes).

This package groups QKV rows by key-value head, [K, G + 2, H]: G queries, one key, one value. It interleaves gate and up
rows. Tensor parallelism can then shard both by contiguous rows. Hugging Face stores q, k, v, gate and up separately,
or q, k, v concatenated in a transposed matrix (GPT-2). RoPE rotates halves in both, so no row of a head is permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """The layout of one weight of this package in Hugging Face weights."""

    def split(self, weight: Tensor) -> list[Tensor]:
        """Split a weight of this package into Hugging Face weights."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face weights into a weight of this package."""


@dataclass(frozen=True)
class Same:
    """One Hugging Face weight with the same rows."""

    def split(self, weight: Tensor) -> list[Tensor]:
        return [weight]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (only,) = parts
        return only


@dataclass(frozen=True, kw_only=True)
class GroupedHeads:
    """Rows (K, G + 2, H) <-> queries (K * G * H), keys (K * H), values (K * H)."""

    queries: int  # G, query heads per key-value head
    head_dim: int  # H

    def split(self, weight: Tensor) -> list[Tensor]:
        groups = weight.unflatten(0, (-1, self.queries + 2, self.head_dim))
        return [part.flatten(0, 2).contiguous() for part in groups.split((self.queries, 1, 1), dim=1)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        groups = [
            part.unflatten(0, (-1, count, self.head_dim))
            for part, count in zip(parts, (self.queries, 1, 1), strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Interleaved:
    """Rows gate 0, up 0, gate 1, up 1, ... <-> gate, up."""

    def split(self, weight: Tensor) -> list[Tensor]:
        return [weight[first::2].contiguous() for first in (0, 1)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(parts), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Transposed:
    """The parts of another layout, concatenated and transposed, as in GPT-2's Conv1D; a bias is only concatenated."""

    inner: Rows
    parts: int = 1

    def split(self, weight: Tensor) -> list[Tensor]:
        return [torch.cat(self.inner.split(weight)).t().contiguous()]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (only,) = parts
        return self.inner.join(only.t().chunk(self.parts)).contiguous()
