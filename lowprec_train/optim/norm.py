"""The norm of all gradients, wherever their shards lie.

    norm^2 = sum over parameters, once each, and over all shards of them, of g^2

Squares are added in FP64, where those of FP32 numbers are exact, and the norm is rounded to FP32 once: it has the same
bits however parameters are sharded (`ops.updates.wide_sum`), so a clipped step does too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.optim.shard import Shard, local


def global_norm(parameters: Iterable[nn.Parameter], shards: Mapping[nn.Parameter, Shard] | None = None) -> Tensor:
    """0-dim FP32, the same on every rank; zero where no parameter has a gradient. One collective for each set of ranks
    that holds shards.

    shards: of parameters that this rank may have a shard of; those without a group count as whole.
    """
    return norm_and_squares(parameters, shards)[0]


@torch.no_grad()
def norm_and_squares(
    parameters: Iterable[nn.Parameter], shards: Mapping[nn.Parameter, Shard] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """`global_norm`, and the sum of squares of each parameter's gradient on this rank: 0-dim FP64, zero without one."""
    groups: dict[Group | None, dict[nn.Parameter, Tensor]] = {}
    squares: dict[nn.Parameter, Tensor] = {}
    totals: list[Tensor] = []
    everyone = list(parameters)
    for parameter in everyone:
        if parameter.grad is None:
            squares[parameter] = torch.zeros((), dtype=torch.float64, device=parameter.device)
        else:
            shard = (shards or {}).get(parameter)
            groups.setdefault(None if shard is None else shard.group, {})[parameter] = local(parameter.grad)
    for group, members in groups.items():
        sums = torch.ops.lowprec.sum_squares([gradient.contiguous() for gradient in members.values()])
        squares |= zip(members, sums.unbind(), strict=True)
        totals.append(sums.sum() if group is None else group.all_reduce_sum(sums.sum()))
    norm = torch.stack(totals).sum().sqrt().float() if totals else torch.zeros(())
    return norm, [squares[parameter] for parameter in everyone]
