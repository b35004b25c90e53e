"""A linear layer cut over ranks: which part of its weight one of them holds, and what they tell each other.

    dim 0, columns of Y cut     Y[:, mine] = X W[mine]^T              X's rows are gathered before, dX's scattered after
    dim 1, columns of X cut     Y = sum over ranks X[:, mine] W[:, mine]^T    Y's rows are scattered, dY's gathered

Codes are those of one process with the whole weight: a tile that spans the cut dimension has one scale for all of it,
so its maximum is taken over ranks; draws count elements of the whole, from `first` on.
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
    """One rank's part of a weight [n, k]: its rows (dim 0, column-parallel) or its columns (dim 1, row-parallel).

    whole: n or k of the whole weight, a multiple of the number of ranks.
    """

    dim: int
    group: Group
    whole: int

    @property
    def part(self) -> int:
        """Rows or columns that this rank holds."""
        return self.whole // self.group.size

    @property
    def first(self) -> int:
        """Where in the whole they begin."""
        return self.group.rank * self.part

    def cut(self, gemm: Gemms, operand: Operand) -> int | None:
        """The dimension along which the ranks hold parts of an operand; None: each of them holds all of it."""
        dim = OPERANDS[gemm.name][operand.name].find("nk"[self.dim])
        return None if dim == -1 else dim

    def shared(self, gemm: Gemms, operand: Operand) -> Shared | None:
        """What rounds this rank's part of an operand as a part of the whole."""
        dim = self.cut(gemm, operand)
        return None if dim is None else Shared(dim=dim, group=self.group)

    def origin(self, gemm: Gemms, operand: Operand, tokens: Tensor | None, device: torch.device) -> Tensor | None:
        """Global row and column of the part's first element. tokens: those of the whole operand's, None for zeros."""
        dim = self.cut(gemm, operand)
        if dim is None:
            return tokens
        place = torch.arange(2, device=device) if dim == 1 else torch.arange(1, -1, -1, device=device)
        return place * self.first if tokens is None else tokens + place * self.first
