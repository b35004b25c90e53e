"""Reduce-scatter and all-reduce of gradients in a codec's wire format.

    reduce_scatter   encode | all-to-all of bytes | decode and sum in rank order
    all_reduce       reduce_scatter, then one more encode | all-gather | decode

or, where the codec says so (`GradCodec.sends_whole`, from sizes that all ranks know), `all_reduce` gathers every
contribution whole and sums them all everywhere: one rounding instead of two.

A bar is one operation over the whole buffer, whatever the number of parameters and of ranks. Only uint8 travels (gloo
knows no FP8, and a network that reduced byte views would add codes). Every rank adds in rank order, so results are the
same bits on every rank. With one rank nothing is rounded.

Sums, never averages: FSDP2 hands a custom reduce-scatter AVG unless `set_force_sum_reduction_for_comms(True)` is set,
and a factor that is applied twice, or never, is silent. Divide where the loss is defined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.process_group import DistributedGroup

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # one call; torch 2.13 has renamed it


class Reduced(NamedTuple):
    """total: FP32 [layout.size]. saturated: the share of all ranks' codes at the maximum, 0-dim FP32; None where sums
    are in FP32.
    """

    total: Tensor
    saturated: Tensor | None = None


@torch.no_grad()
def reduce_scatter(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    codec: GradCodec,
    layout: FlatLayout,
    *,
    mu: Tensor | None = None,
    op: Any = dist.ReduceOp.SUM,
    out: Tensor | None = None,
) -> Reduced:
    """The sum over ranks of this rank's row.

    Args:
        flat: [ranks * layout.size], any float dtype: row r is summed for rank r.
        group: process group; None is the default one.
        codec: what a contribution looks like on the wire; the same on every rank.
        layout: the ranges of one row; the same on every rank.
        mu: head-room of a codec that shares scales, 0-dim FP32 in [1/ranks, 1] (`MuSchedule.mu`).
        op: must be SUM.
        out: FP32 [layout.size] that takes the sum; None makes it.

    Returns:
        A non-finite element of any rank makes its block NaN (Inf and NaN as they are where they travel in BF16) on the
        rank that owns it, as in any reduce-scatter; under a shared scale its parameter, on every rank.

    Raises:
        ValueError: another `op`, sizes that do not fit together, a flat tensor that is not of a float dtype, an `out`
        that is not FP32.
    """
    ranks = dist.get_world_size(group)
    rows, out = _rows(flat, ranks, layout, op), _sums(out, flat, layout)
    if ranks == 1:
        return Reduced(out.copy_(rows[0]))
    scales = codec.scales(rows, layout, DistributedGroup.of(group), mu)
    parts, row = codec.wire_layout(layout).pieces(rows), codec.wire_layout(layout)
    return _scattered(parts, out, group, codec, row, scales, ranks * layout.coded_size)


@torch.no_grad()
def all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    codec: GradCodec,
    layout: FlatLayout,
    *,
    mu: Tensor | None = None,
    op: Any = dist.ReduceOp.SUM,
    out: Tensor | None = None,
) -> Reduced:
    """The sum over ranks, the same bits on each. flat: [layout.size]; out may be `flat`; other arguments and errors as
    `reduce_scatter`.

    A non-finite element of any rank makes its block NaN on every rank, its parameter under a shared scale.
    """
    ranks = dist.get_world_size(group)
    rows, out = _rows(flat, 1, layout, op), _sums(out, flat, layout)
    if ranks == 1:
        return Reduced(out.copy_(rows[0]))
    scales = codec.scales(rows, layout, DistributedGroup.of(group), mu)
    codes, layout = layout.coded_size, codec.wire_layout(layout)
    mine, sums = layout.pieces(rows[0]), layout.pieces(out)
    if codec.sends_whole(layout, ranks):
        codec.decode(_gathered(codec.encode(mine, 1, layout, scales), group), sums, layout, scales, senders=ranks)
        return Reduced(out)
    row = layout.split(ranks, codec.block)
    summed = _scattered(mine, out.new_empty(row.size), group, codec, row, scales, codes)
    wire = codec.encode(row.pieces(summed.total), 1, row, scales)
    codec.decode(_gathered(wire, group), sums, row, scales)
    return summed._replace(total=out)


def reduce_scatter_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter of rows of `layout`; maxima and counts of a shared scale aside."""
    return (ranks - 1) * codec.row_bytes(layout)


def all_reduce_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Bytes that each rank sends in an all-reduce of `layout`; maxima and counts of a shared scale aside."""
    if codec.sends_whole(layout, ranks):
        return (ranks - 1) * codec.row_bytes(layout)
    return 2 * (ranks - 1) * codec.row_bytes(codec.wire_layout(layout).split(ranks, codec.block))


def _rows(flat: Tensor, ranks: int, layout: FlatLayout, op: Any) -> Tensor:
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"gradients are summed; {op} is not a sum (FSDP2: set_force_sum_reduction_for_comms(True))")
    if flat.numel() != ranks * layout.size:
        raise ValueError(f"{flat.numel()} elements are not {ranks} rows of {layout.size}")
    if not flat.is_floating_point():
        raise ValueError(f"gradients are floating point, not {flat.dtype}")
    return flat.view(ranks, layout.size)


def _sums(out: Tensor | None, flat: Tensor, layout: FlatLayout) -> Tensor:
    if out is None:
        return torch.empty(layout.size, device=flat.device)
    if out.shape != (layout.size,) or out.dtype != torch.float32:
        raise ValueError(f"sums are FP32 [{layout.size}], not {out.dtype} {list(out.shape)}")
    return out


def _scattered(
    parts: tuple[Tensor, ...],
    out: Tensor,
    group: dist.ProcessGroup | None,
    codec: GradCodec,
    row: FlatLayout,
    scales: Tensor | None,
    codes: int,
) -> Reduced:
    """The sum over ranks of this rank's row, in `out`. codes: of all ranks' sums."""
    ranks = dist.get_world_size(group)
    wire = codec.encode(parts, ranks, row, scales)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    at_maximum = codec.decode(arrived, row.pieces(out), row, scales, senders=ranks)
    if at_maximum is None:
        return Reduced(out)
    count = DistributedGroup.of(group).all_reduce_sum(at_maximum.double())
    return Reduced(out, count.long() / max(1, codes))


def _gathered(wire: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[rows, bytes] of every rank, one after the other."""
    arrived = wire.new_empty((dist.get_world_size(group) * len(wire), wire.shape[1]))
    ALL_GATHER(arrived, wire, group=group)
    return arrived
