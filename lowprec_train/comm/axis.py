"""Sums of gradients over one axis of the mesh, with count kept of what they send and lose.

What a step lost is measured as a share of what went in, as in payload.py, and told in decibels:

    SQNR = 10 log10( sum_i |g_i|^2 / sum_i |e_i|^2 )        i: ranks; e_i: what rank i's rounding does to the sum

With one encode and FP32 sums e_i = decode(encode(g_i)) - g_i, which each rank knows by itself: it decodes one of its
rows, another one each time. The second encode of a two-step all-reduce is taken to lose the share that the first one
did. Sums in FP8 round where no rank sees it alone: they are compared with an FP32 sum, which is sent for the purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm import collectives
from lowprec_train.comm.layout import Layout
from lowprec_train.comm.payload import Payload, rounding_energy
from lowprec_train.comm.shared_scale import MuSchedule, SharedScale
from lowprec_train.numerics.formats import FP32

EXACT = Payload(FP32)


class Axis:
    """The ranks of `group` (None: this rank alone) and one step's account of their reductions.

    head_room: FP8-LM's mu, moved by whoever ends the step.
    at_maximum: the largest share of codes at the maximum that a shared-scale reduction left, 0-dim.
    energy: (signal, noise) on this rank, to be added up over ranks, FP32 [2]; zeros unless the step is measured.
    sent: bytes.

    Only one CUDA stream may call an axis: `fully_shard` gives its reduce-scatters one and its hooks another.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, payload: Payload | SharedScale, device: torch.device | str
    ) -> None:
        self.group, self.payload = group, payload
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.head_room = MuSchedule(self.ranks, device)
        self.at_maximum = torch.zeros((), device=device)
        self.energy = torch.zeros(2, device=device)
        self.sent = 0
        self._measured_row: int | None = None

    @property
    def rounds(self) -> bool:
        """Whether anything can be lost."""
        return self.ranks > 1 and self.payload != EXACT

    def begin_step(self, sample: int | None) -> None:
        """Start a new account. sample: the number of measurements so far when this step is one, else None."""
        self._measured_row = None if sample is None else sample % self.ranks
        self.at_maximum.zero_()
        self.energy.zero_()
        self.sent = 0

    @torch.no_grad()
    def reduce_scatter(self, flat: Tensor, layout: Layout, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """As `collectives.reduce_scatter`."""
        self.sent += collectives.reduce_scatter_bytes(self.payload, layout, self.ranks)
        both = collectives.reduce_scatter, collectives.reduce_scatter_shared
        total = self._sum(*both, flat, layout, op)
        if self._measured_row is not None and self.rounds:
            self.energy += self._scatter_energy(flat, total, layout, self._measured_row)
        return total

    @torch.no_grad()
    def all_reduce(self, flat: Tensor, layout: Layout) -> Tensor:
        """As `collectives.all_reduce`."""
        self.sent += collectives.all_reduce_bytes(self.payload, layout, self.ranks)
        both = collectives.all_reduce, collectives.all_reduce_shared
        total = self._sum(*both, flat, layout, dist.ReduceOp.SUM)
        if self._measured_row is not None and self.rounds:
            self.energy += self._all_reduce_energy(flat, total, layout)
        return total

    def _sum(
        self, plain: Callable[..., Tensor], shared: Callable[..., Any], flat: Tensor, layout: Layout, op: Any
    ) -> Tensor:
        if isinstance(self.payload, Payload):
            return plain(flat, self.group, self.payload, layout, op=op)
        total, share = shared(flat, self.group, self.payload, layout, self.head_room.mu, op=op)
        self.at_maximum.copy_(torch.maximum(self.at_maximum, share))
        return total  # type: ignore[no-any-return]

    def _scatter_energy(self, flat: Tensor, total: Tensor, layout: Layout, row: int) -> Tensor:
        if isinstance(self.payload, SharedScale):
            exact = collectives.reduce_scatter(flat, self.group, EXACT, layout)
            return torch.stack((_squares(flat), _squares(total - exact)))
        rows = flat.view(self.ranks, -1)[row : row + 1]
        return self.ranks * rounding_energy(rows, self.payload, layout).sum(0)

    def _all_reduce_energy(self, flat: Tensor, total: Tensor, layout: Layout) -> Tensor:
        """Every rank holds the whole sum: its share of that sum's noise is one of `ranks` parts."""
        if isinstance(self.payload, SharedScale):
            exact = collectives.all_reduce(flat, self.group, EXACT, layout)
            return torch.stack((_squares(flat), _squares(total - exact) / self.ranks))
        signal, noise = rounding_energy(flat[None], self.payload, layout).sum(0).unbind()
        if not collectives.sends_whole(self.payload, layout, self.ranks):
            tiny = torch.finfo(signal.dtype).tiny
            noise = noise + noise / signal.clamp_min(tiny) * _squares(total) / self.ranks
        return torch.stack((signal, noise))


def _squares(x: Tensor) -> Tensor:
    return x.float().square().sum()
