"""Into the sequence-parallel region of a tensor-parallel model, where a rank's residual stream is a part of the tokens:

    tokens [B, T] -> embedding, of the words that a rank holds -> sum over ranks -> positions -> own rows [1, BT / n, D]

Column-parallel linears gather the rows that they need, row-parallel ones scatter what they made (`precision.split`), so
norms, residual sums and all that is kept for them are a rank's own rows. The last linear, the head, gathers them for
its words of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.precision.split import Split


class Embedding(nn.Embedding):
    """tokens [B, T] -> [B, T, D]. With a split the weight holds `part` words of `whole`, and every rank gets the sums
    of what all have: at most one addend of an element is not zero.
    """

    split: Split | None = None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if self.split is None:
            return super().forward(tokens_BT)
        local_BT = tokens_BT - self.split.first
        here_BT = (local_BT >= 0) & (local_BT < self.split.part)
        mine_BTD = F.embedding(local_BT.where(here_BT, 0), self.weight) * here_BT.unsqueeze(-1)
        return _SumOverRanks.apply(mine_BTD, self.split.group)


def own_rows(x_BTD: Tensor, group: Group) -> Tensor:
    """[B, T, D], the same on every rank -> this rank's rows of the tokens in a row, [1, BT / ranks, D]."""
    rows: Tensor = _OwnRows.apply(x_BTD.flatten(end_dim=-2), group)
    return rows.unsqueeze(0)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks, on all of them. Everything behind it is the same on all, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: Group) -> Tensor:
        mine_MD = group.reduce_scatter(x_BTD.flatten(end_dim=-2))
        return group.all_gather(mine_MD).view_as(x_BTD).clone()  # FSDP2 warns of a unit that returns a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _OwnRows(torch.autograd.Function):
    """Rows of a matrix that all ranks hold; backward brings the gradients of all rows to all ranks."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, group: Group) -> Tensor:
        ctx.group = group
        rows = x_MD.shape[0] // group.size
        return x_MD.narrow(0, group.rank * rows, rows).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0]), None
