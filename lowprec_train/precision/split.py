"""Tensor parallelism of a linear layer: the shard of a rank, and the communication between ranks.

    dim 0, column-parallel   Y[:, mine] = X W[mine]^T                      all-gather of X, reduce-scatter of dX
    dim 1, row-parallel      Y = sum over ranks X[:, mine] W[:, mine]^T    reduce-scatter of Y, all-gather of dY

Codes equal those of one process with the whole weight: a tile that spans the sharded dimension has one scale, from the
maximum over ranks, and random draws are indexed by elements of the whole weight, from `first` on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Shared

OPERANDS = {  # rows and columns of X, W; dY, W^T; dY^T, X^T
    "FPROP": {"A": "mk", "B": "nk"},
    "DGRAD": {"A": "mn", "B": "kn"},
    "WGRAD": {"A": "nm", "B": "km"},
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """A rank's shard of a weight [n, k]: rows (dim 0, column-parallel) or columns (dim 1, row-parallel).

    whole: n or k of the whole weight, a multiple of the number of ranks.
    """

    dim: int
    group: Group
    whole: int

    @property
    def part(self) -> int:
        """Number of rows or columns of this rank's shard."""
        return self.whole // self.group.size

    @property
    def first(self) -> int:
        """Index of the shard's first row or column in the whole."""
        return self.group.rank * self.part

    def cut(self, gemm: Gemms, operand: Operand) -> int | None:
        """Return the dimension along which an operand is sharded; None if it is replicated."""
        dim = OPERANDS[gemm.name][operand.name].find("nk"[self.dim])
        return None if dim == -1 else dim

    def shared(self, gemm: Gemms, operand: Operand) -> Shared | None:
        """Return the description of this rank's shard of an operand for its quantiser."""
        dim = self.cut(gemm, operand)
        return None if dim is None else Shared(dim=dim, group=self.group)

    def origin(self, gemm: Gemms, operand: Operand, tokens: Tensor | None, device: torch.device) -> Tensor | None:
        """Return global row and column of the shard's first element. tokens: of the whole operand; None: zeros."""
        dim = self.cut(gemm, operand)
        if dim is None:
            return tokens
        place = torch.arange(2, device=device) if dim == 1 else torch.arange(1, -1, -1, device=device)
        return place * self.first if tokens is None else tokens + place * self.first
