"""The global norm of sharded gradients.

    norm^2 = sum over parameters, once each, and over all shards of them, of g^2

Squares are added in FP64, in which squares of FP32 numbers are exact, and the norm is rounded to FP32 once. It has the
same bits for any sharding of parameters (`ops.updates.wide_sum`), and so has a clipped step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.optim.shard import Shard, local


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this norm, FP32, are divided by so that it is at most max_norm. 0: no clipping."""
    return ((norm + 1e-6) / (max_norm or float("inf"))).clamp(min=1.0)


@torch.no_grad()
def norm_and_squares(
    parameters: Iterable[nn.Parameter],
    shards: Mapping[nn.Parameter, Shard] | None = None,
    known: Mapping[nn.Parameter, Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the norm, 0-dim FP32 and equal on all ranks, and each parameter's sum of squares on this rank, 0-dim FP64.

    Both are zero without gradients. One collective for each set of ranks that share parameters. shards: of parameters;
    those without a group are whole. known: sums of squares of gradients that were freed.
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
