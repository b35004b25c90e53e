"""One parameter of an optimizer: the storage of the parameter and its states, and the position of this rank's shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.ops.codecs import Parts, StateCodecs, as_matrix, row_segments
from lowprec_train.optim.shard import Shard, local


@dataclass(frozen=True, kw_only=True)
class ParamState:
    """A parameter and its states.

    index: among all parameters, 0-dim int64. origin: row and column of the shard's first element in the whole matrix,
    int64 [2]. numbers: number of elements of the whole tensor, 0-dim FP64. All on the device of the parameter.
    segments: of a row of the shard. regions: first row and column, rows and columns of each rank's shard, if whole
    matrices are gathered.
    """

    owner: nn.Parameter
    codecs: StateCodecs
    shard: Shard | None
    index: Tensor
    origin: Tensor
    numbers: Tensor
    segments: int
    state: Parts
    regions: Sequence[Sequence[int]] = ()

    @property
    def parameter(self) -> Tensor:
        return local(self.owner)

    @property
    def gradient(self) -> Tensor:
        assert self.owner.grad is not None
        return local(self.owner.grad)

    @property
    def group(self) -> Group | None:
        """Ranks with shards of the parameter; None if it is not sharded."""
        return None if self.shard is None else self.shard.group

    @property
    def where(self) -> dict[str, Any]:
        """Position of the shard, for its codecs."""
        return {"segments": self.segments, "origin": self.origin}

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole matrix, gathered from the shards x [n, k]; collective over the group."""
        if self.group is None:
            return x
        sizes = [max(region[dim] for region in self.regions) for dim in (2, 3)]
        padded = x.new_zeros((1, *sizes))
        padded[0, : x.shape[0], : x.shape[1]] = x
        whole = x.new_empty([max(region[dim] + region[dim + 2] for region in self.regions) for dim in (0, 1)])
        for part, (row, column, rows, columns) in zip(self.group.all_gather(padded), self.regions, strict=True):
            whole[row : row + rows, column : column + columns] = part[:rows, :columns]
        return whole

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole matrix."""
        if self.group is None:
            return whole
        row, column, rows, columns = self.regions[self.group.rank]
        return whole[row : row + rows, column : column + columns]


def with_regions(states: Sequence[ParamState]) -> list[ParamState]:
    """Return the states with the regions of all ranks' shards; one collective for each group."""
    found = list(states)
    for group in dict.fromkeys(state.group for state in states if state.group is not None):
        mine = [place for place, state in enumerate(states) if state.group == group]
        sizes = [as_matrix(states[place].parameter).shape for place in mine]
        origins = torch.stack([states[place].origin for place in mine])
        here = torch.cat([origins, torch.tensor(sizes, device=origins.device)], dim=1)
        table = group.all_gather(here[None]).tolist()
        for at, place in enumerate(mine):
            found[place] = replace(states[place], regions=tuple(tuple(rank[at]) for rank in table))
    return found


def param_state(
    owner: nn.Parameter,
    index: int,
    codecs: StateCodecs,
    shard: Shard | None,
    state: Parts,
    device: torch.device | None = None,
) -> ParamState:
    """Create the state of a parameter. device: of the updates; None: that of the parameter. Raises ValueError for a
    shard whose boundaries its codecs do not support.
    """
    here = local(owner)
    whole = tuple(here.shape) if shard is None else shard.shape
    if shard is not None and tuple(here.shape) != shard.local:
        raise ValueError(f"a parameter's shard of shape {tuple(here.shape)} is said to have shape {shard.local}")
    return ParamState(
        owner=owner,
        codecs=codecs,
        shard=shard,
        index=torch.tensor(index, device=device or here.device),
        origin=torch.tensor((0, 0) if shard is None else shard.origin, device=device or here.device),
        numbers=torch.tensor(math.prod(whole), dtype=torch.float64, device=device or here.device),
        segments=row_segments(whole[-1] if whole else 1) if shard is None else _segments(shard, codecs),
        state=state,
    )


def _segments(shard: Shard, codecs: StateCodecs) -> int:
    columns, first, here = shard.shape[-1], shard.first[-1], shard.local[-1]
    unit = columns // row_segments(columns)
    for _, codec in codecs.named:
        if codec.expanded and (first % unit or here % unit):
            raise ValueError(
                f"columns {first} to {first + here} of {columns} cannot be stored apart: groups of expanded moments "
                f"restart at multiples of {unit}"
            )
        if codec.stochastic and first % 8:
            raise ValueError(f"column {first} of {columns} begins a shard: stochastic masters draw 8 columns at a time")
    return max(1, here // unit)
