"""Gradient sums over one axis of the mesh, with an account of the bytes that they send and the error that they make.

The error of a step is relative to the contributions, as in block_scaled.py, in decibels:

    SQNR = 10 log10( sum_i |g_i|^2 / sum_i |e_i|^2 )        i: ranks; e_i: effect of rank i's rounding on the sum

With one encode and FP32 sums e_i = decode(encode(g_i)) - g_i, which each rank computes alone: it decodes one of its
rows, a different one each time, and, of the sums inside nodes, those that it encodes for that row. The second encode of
a two-step all-reduce is assumed to lose the same share as the first. No single rank sees the rounding of FP8 sums: they
are compared with an FP32 sum, which is sent for this purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.comm import collectives
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import Reduced
from lowprec_train.comm.grad_codec import GradCodec, rounding_energy
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.nodes import Links, Nodes
from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.comm.shared_scale import MuSchedule
from lowprec_train.comm.symmetric_memory import PeerRows
from lowprec_train.numerics.formats import FP32

EXACT = BlockScaledCodec(FP32)


class Axis:
    """The ranks of `group` (None: this rank alone), by node, and the account of one step's reductions.

    peers: as in `collectives.reduce_scatter`.
    head_room: FP8-LM's mu, updated by the caller at the end of a step.
    energy: (signal, noise) on this rank, to be summed over ranks, FP32 [2]; zeros unless the step is measured.
    sent: bytes, by kind of link.

    Only one CUDA stream may use an axis: `fully_shard` has one for its reduce-scatters and another for its hooks.
    """

    def __init__(self, group: dist.ProcessGroup | Nodes | None, codec: GradCodec, device: torch.device | str) -> None:
        self.group, self.codec = group, codec
        self.peers: PeerRows | None = None
        nodes = Nodes.one(group) if isinstance(group, dist.ProcessGroup) else group
        self.ranks, self.node = (1, 1) if nodes is None else (nodes.ranks, nodes.node)
        self._number = 0 if nodes is None else dist.get_rank(nodes.whole) % self.node
        self.head_room = MuSchedule(self.ranks, device)
        self.energy = torch.zeros(2, device=device)
        self.sent = Links(0, 0)
        self._at_maximum: list[tuple[Tensor, int]] = []  # per reduction: this rank's count, all ranks' codes
        self._measured_row: int | None = None

    @property
    def rounds(self) -> bool:
        """Whether the reductions round."""
        return self.ranks > 1 and not self.codec.exact

    def begin_step(self, sample: int | None) -> None:
        """Start a new account. sample: the number of earlier measurements if this step is measured, else None."""
        self._measured_row = None if sample is None else sample % self.ranks
        self._at_maximum.clear()
        self.energy.zero_()
        self.sent = Links(0, 0)

    @torch.no_grad()
    def reduce_scatter(self, gradients: Sequence[Tensor], out: Tensor, layout: FlatLayout) -> None:
        """Reduce-scatter gradients, one for each range of `layout`, to `out` with `collectives.reduce_scatter`."""
        self.sent = self.sent.plus(collectives.reduce_scatter_links(self.codec, layout, self.ranks, self.node))
        parts = _in_one_dtype(gradients)
        given = _rows(parts, layout, slice(0, self.ranks)).flatten() if self.codec.shares_scales else parts
        reduced = collectives.reduce_scatter(
            given, self.group, self.codec, layout, mu=self._mu, out=out, peers=self.peers
        )
        self._note(reduced, self.ranks * layout.coded_size)
        if self._measured_row is not None and self.rounds:
            self.energy += self._scatter_energy(parts, out, layout, self._measured_row)
            if reduced.of_nodes is not None and self._measured_row % self.node == self._number:
                place = self._measured_row // self.node  # what was sent to the measured row's node
                self.energy[1] += self.ranks * self._noise(reduced.of_nodes[place : place + 1], layout)

    @torch.no_grad()
    def all_reduce(self, flat: Tensor, layout: FlatLayout) -> None:
        """All-reduce FP32 [layout.size] in place with `collectives.all_reduce`."""
        self.sent = self.sent.plus(collectives.all_reduce_links(self.codec, layout, self.ranks, self.node))
        measured = self._measured_row is not None and self.rounds
        contribution = flat.clone() if measured else flat
        reduced = collectives.all_reduce(flat, self.group, self.codec, layout, mu=self._mu, out=flat)
        self._note(reduced, layout.coded_size)
        if measured:
            self.energy += self._all_reduce_energy(contribution, flat, layout)
            if reduced.of_nodes is not None:
                part = self.codec.wire_layout(layout).split(self.ranks, self.codec.block)
                self.energy[1] += self._noise(reduced.of_nodes, part)

    def at_maximum(self) -> Tensor:
        """Return the largest share of codes at the maximum in a shared-scale reduction of the step, over all ranks of
        this axis, 0-dim FP32. It is one collective, which all ranks call.
        """
        if not self._at_maximum:
            return torch.zeros_like(self.energy[0])
        group = self.group.whole if isinstance(self.group, Nodes) else self.group
        counts = torch.stack([count for count, _ in self._at_maximum]).double()
        codes = _numbers(tuple(codes for _, codes in self._at_maximum), counts.device)
        return (DistributedGroup.of(group).all_reduce_sum(counts).float() / codes).amax()

    @property
    def _mu(self) -> Tensor | None:
        return self.head_room.mu if self.codec.shares_scales else None

    def _note(self, reduced: Reduced, codes: int) -> None:
        if reduced.at_maximum is not None:
            self._at_maximum.append((reduced.at_maximum, max(1, codes)))

    def _scatter_energy(self, parts: Sequence[Tensor], total: Tensor, layout: FlatLayout, row: int) -> Tensor:
        if self.codec.shares_scales:
            exact = collectives.reduce_scatter(parts, self.group, EXACT, layout).total
            return torch.stack((torch.stack([_squares(part) for part in parts]).sum(), _squares(total - exact)))
        return self.ranks * rounding_energy(_rows(parts, layout, slice(row, row + 1)), self.codec, layout).sum(0)

    def _noise(self, rows: Tensor, layout: FlatLayout) -> Tensor:
        """Return the noise of rows that this rank encoded: sums inside its node."""
        return rounding_energy(rows, self.codec, layout)[:, 1].sum()

    def _all_reduce_energy(self, flat: Tensor, total: Tensor, layout: FlatLayout) -> Tensor:
        """Return (signal, noise). Every rank has the whole sum and counts 1 / ranks of its noise."""
        if self.codec.shares_scales:
            exact = collectives.all_reduce(flat, self.group, EXACT, layout).total
            return torch.stack((_squares(flat), _squares(total - exact) / self.ranks))
        signal, noise = rounding_energy(flat[None], self.codec, layout).sum(0).unbind()
        if not self.codec.sends_whole(layout, self.ranks):
            tiny = torch.finfo(signal.dtype).tiny
            noise = noise + noise / signal.clamp_min(tiny) * _squares(total) / self.ranks
        return torch.stack((signal, noise))


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an FP32 tensor, copied to the device once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _in_one_dtype(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in one dtype, FP32 if they differ, 1-D."""
    dtypes = {gradient.dtype for gradient in gradients}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return [gradient.to(dtype).flatten() for gradient in gradients]


def _rows(parts: Sequence[Tensor], layout: FlatLayout, which: slice) -> Tensor:
    """Return these rows [rows, layout.size] of the parts: rows of each range in turn, maybe truncated."""
    count, made = which.stop - which.start, []
    for part, each in zip(parts, layout.ranges, strict=True):
        here = part[which.start * each.size : which.stop * each.size]
        missing = count * each.size - here.numel()
        made.append((F.pad(here, (0, missing)) if missing else here).view(count, each.size))
    return torch.cat(made, dim=1)


def _squares(x: Tensor) -> Tensor:
    return x.float().square().sum()
