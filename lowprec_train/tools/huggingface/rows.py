"""How one of our matrices lies in theirs: four layouts, each with its way back.

A layout takes our tensor apart into theirs and joins theirs to ours; both only move numbers, so a round trip returns
the same bits. All work on weights [N, D] and on biases [N], and on the meta device, where they tell shapes.

Ours: qkv is grouped by key-value head, (K, G + 2, H), the queries of a group, its key, its value; gate and up rows
alternate. Both let tensor parallelism cut rows into parts that stand for themselves. Theirs are apart, or fused as
(q, k, v), and GPT-2's matrices are transposed. Rotary embedding pairs up halves on both sides: nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """How one of our tensors is laid out in theirs."""

    def split(self, ours: Tensor) -> list[Tensor]:
        """Split our tensor into theirs."""
        ...

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        """Join their tensors into ours."""
        ...


@dataclass(frozen=True)
class Same:
    """The same tensor on both sides."""

    def split(self, ours: Tensor) -> list[Tensor]:
        return [ours]

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        (only,) = theirs
        return only


@dataclass(frozen=True, kw_only=True)
class GroupedHeads:
    """Rows (K, G + 2, H) <-> queries (K * G * H), keys (K * H), values (K * H)."""

    queries: int  # G, query heads per key-value head
    head_dim: int  # H

    def split(self, ours: Tensor) -> list[Tensor]:
        groups = ours.unflatten(0, (-1, self.queries + 2, self.head_dim))
        return [part.flatten(0, 2).contiguous() for part in groups.split((self.queries, 1, 1), dim=1)]

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        groups = [
            part.unflatten(0, (-1, count, self.head_dim))
            for part, count in zip(theirs, (self.queries, 1, 1), strict=True)
        ]
        return torch.cat(groups, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Alternating:
    """Rows gate 0, up 0, gate 1, up 1, ... <-> gate, up."""

    def split(self, ours: Tensor) -> list[Tensor]:
        return [ours[first::2].contiguous() for first in (0, 1)]

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(theirs), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Transposed:
    """Another layout's parts below each other in one tensor, transposed, as GPT-2's Conv1D has it; biases stay."""

    inner: Rows
    parts: int = 1

    def split(self, ours: Tensor) -> list[Tensor]:
        return [torch.cat(self.inner.split(ours)).t().contiguous()]

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        (only,) = theirs
        return self.inner.join(only.t().chunk(self.parts)).contiguous()
