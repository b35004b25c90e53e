"""Global amax and update RMS of sharded tensors, all-reduced before the step.

    RMS of a clipped update     sqrt(sum over all shards of g'^2 / max(v'^, eps^2), by the number of elements)
    per-tensor scale            from the amax, over all shards, of the new moment or weight

The update is computed twice, once for its statistics and once to be stored; only a few numbers per tensor are kept in
between. Tensors with shards on the same ranks share one collective per pass. Sums are in FP64 (`ops.updates.wide_sum`),
so an RMS does not depend on the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.ops.updates import root_mean
from lowprec_train.optim.batch import Batch


@dataclass(frozen=True, kw_only=True)
class TensorStats:
    """RMS [p] and amax [p, names] of a batch, FP32; None if they are not needed or tensors are not sharded."""

    rms: Tensor | None = None
    amax: Tensor | None = None


def tensor_stats(batches: Sequence[Batch]) -> list[TensorStats]:
    """Return the statistics of each batch, before any batch is updated. Collective for the ranks with shards."""
    sharded = [place for place, batch in enumerate(batches) if batch.group is not None]
    squares = {place: batches[place].squares() for place in sharded if batches[place].rule.needs_rms}
    totals = _reduced(batches, squares, lambda group, x: group.all_reduce_sum(x))
    rms = {place: root_mean(total, _numbers(batches[place])) for place, total in totals.items()}
    local = {place: batches[place].amax(rms.get(place)) for place in sharded if batches[place].codecs.one_scale}
    amax = _reduced(batches, local, lambda group, x: group.all_reduce_max(x))
    return [TensorStats(rms=rms.get(place), amax=amax.get(place)) for place in range(len(batches))]


def update_rms(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the RMS [p] of the updates of each batch's whole tensors, clipped or not. Collective for the ranks with
    shards.
    """
    squares = {place: batch.squares() for place, batch in enumerate(batches)}
    cut = {place: total for place, total in squares.items() if batches[place].group is not None}
    squares |= _reduced(batches, cut, lambda group, x: group.all_reduce_sum(x))
    return [root_mean(squares[place], _numbers(batch)) for place, batch in enumerate(batches)]


def over_groups(values: Sequence[tuple[Group, Tensor]], reduce: Callable[[Group, Tensor], Tensor]) -> list[Tensor]:
    """Reduce tensors of one dtype, each over its group, with one collective for each group."""
    reduced: dict[int, Tensor] = {}
    for group in dict.fromkeys(group for group, _ in values):
        mine = [place for place, (each, _) in enumerate(values) if each == group]
        flat = reduce(group, torch.cat([values[place][1].flatten() for place in mine]))
        parts = flat.split([values[place][1].numel() for place in mine])
        reduced |= {place: part.view(values[place][1].shape) for place, part in zip(mine, parts, strict=True)}
    return [reduced[place] for place in range(len(values))]


def _reduced(
    batches: Sequence[Batch], local: dict[int, Tensor], reduce: Callable[[Group, Tensor], Tensor]
) -> dict[int, Tensor]:
    values = [(group, x) for place, x in local.items() if (group := batches[place].group) is not None]
    return dict(zip(local, over_groups(values, reduce), strict=True))


def _numbers(batch: Batch) -> Tensor:
    return torch.stack([member.numbers for member in batch.members])
