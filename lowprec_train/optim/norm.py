"""The norm of all gradients, wherever their pieces lie.

    norm^2 = sum over parameters, once each, and over all pieces of them, of g^2

Squares are added in FP64, where those of FP32 numbers are exact, and the norm is rounded to FP32 once: it has the same
bits however parameters are cut (`ops.updates.wide_sum`), so a clipped step does too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.ops.updates import wide_squares
from lowprec_train.optim.piece import Piece, local


def global_norm(parameters: Iterable[nn.Parameter], pieces: Mapping[nn.Parameter, Piece] | None = None) -> Tensor:
    """0-dim FP32, the same on every rank; zero where no parameter has a gradient. One collective for each set of ranks
    that holds pieces.

    pieces: of parameters that this rank may have a part of; those without holders count as whole.
    """
    return norm_and_squares(parameters, pieces)[0]


@torch.no_grad()
def norm_and_squares(
    parameters: Iterable[nn.Parameter], pieces: Mapping[nn.Parameter, Piece] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """`global_norm`, and the sum of squares of each parameter's gradient on this rank: 0-dim FP64, zero without one."""
    pieces = pieces or {}
    sums: dict[Group | None, Tensor] = {}
    each: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            each.append(torch.zeros((), dtype=torch.float64, device=parameter.device))
            continue
        holders = pieces[parameter].holders if parameter in pieces else None
        squares = wide_squares(local(parameter.grad))
        sums[holders] = sums[holders] + squares if holders in sums else squares
        each.append(squares)
    totals = [total if holders is None else holders.all_reduce_sum(total) for holders, total in sums.items()]
    return (torch.stack(totals).sum().sqrt().float() if totals else torch.zeros(())), each
