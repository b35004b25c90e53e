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


@torch.no_grad()
def norm_and_squares(
    parameters: Iterable[nn.Parameter],
    shards: Mapping[nn.Parameter, Shard] | None = None,
    known: Mapping[nn.Parameter, Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The norm, 0-dim FP32, the same on every rank, zero where no parameter has a gradient; and the sum of squares of
    each parameter's gradient on this rank, 0-dim FP64, zero without one. One collective for each set of ranks that hold
    shards.

    shards: of parameters that this rank may have a shard of; those without a group count as whole. known: sums of
    squares of gradients that are gone.
    """
    groups: dict[Group | None, list[nn.Parameter]] = {}
    squares: dict[nn.Parameter, Tensor] = dict(known or {})
    totals: list[Tensor] = []
    everyone = list(parameters)
    for parameter in everyone:
        if parameter.grad is None and parameter not in squares:
            squares[parameter] = torch.zeros((), dtype=torch.float64, device=parameter.device)
        else:
            shard = (shards or {}).get(parameter)
            groups.setdefault(None if shard is None else shard.group, []).append(parameter)
    for group, members in groups.items():
        gradients = {each: local(each.grad).contiguous() for each in members if each.grad is not None}
        if gradients:
            sums = torch.ops.lowprec.sum_squares(list(gradients.values()))
            squares |= zip(gradients, sums.unbind(), strict=True)
        total = torch.stack([squares[each] for each in members]).sum()
        totals.append(total if group is None else group.all_reduce_sum(total))
    norm = torch.stack(totals).sum().sqrt().float() if totals else torch.zeros(())
    return norm, [squares[parameter] for parameter in everyone]
