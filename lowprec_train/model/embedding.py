"""From token numbers to rows of the residual stream, whole or cut over tensor-parallel ranks.

Whole, an embedding is nn.Embedding. Cut, each rank holds some of the vocabulary's rows, looks up the tokens that it
has, leaves zeros for the others, and the ranks' results are summed as they are scattered: every rank goes on with the
sum of its own rows of the stream. One term of each sum is not zero, so the sum is exact.

Shapes: B sequences of T tokens, flattened to B T rows of width D; a rank's rows are consecutive.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.precision.split import Ranks, Split


class Embedding(nn.Embedding):
    """tokens [B, T] -> [B, T, D]; with `split`, of the vocabulary's rows, -> this rank's rows [1, B T / ranks, D]."""

    split: Split | None = None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if self.split is None:
            return super().forward(tokens_BT)
        place_BT = tokens_BT - self.split.first
        absent_BT = (place_BT < 0) | (place_BT >= self.split.part)
        found_BTD = F.embedding(place_BT.masked_fill(absent_BT, 0), self.weight).masked_fill(absent_BT[..., None], 0.0)
        return self.split.ranks.scatter_sum_rows(found_BTD.flatten(0, 1)).unsqueeze(0)


def rows_of(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's rows of an x [B T, D] that every rank holds; the gradient of x is whole again on every rank."""
    rows: Tensor = _RowsOf.apply(x, ranks)
    return rows


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        rows = x.shape[0] // ranks.count
        return x.narrow(0, ranks.index * rows, rows).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(gradients[0], 0), None
