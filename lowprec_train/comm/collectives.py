"""Reduce-scatter and all-reduce of gradients in a codec's wire format.

    reduce_scatter   encode | all-to-all of bytes | decode and sum in rank order
    all_reduce       reduce_scatter, then one more encode | all-gather | decode

or, where the codec says so (`GradCodec.sends_whole`, from sizes that all ranks know), `all_reduce` gathers every
contribution whole and sums them all everywhere: one rounding instead of two.

A bar is one operation over the whole buffer, whatever the number of parameters and of ranks. Only uint8 travels (gloo
knows no FP8, and a network that reduced byte views would add codes). Every rank adds in rank order, so results are the
same bits on every rank. With one rank nothing is rounded. Where ranks lie on several nodes, sums are made inside of
each node first, encoded once more, and exchanged between nodes (nodes.py).

Sums, never averages: FSDP2 hands a custom reduce-scatter AVG unless `set_force_sum_reduction_for_comms(True)` is set,
and a factor that is applied twice, or never, is silent. Divide where the loss is defined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.nodes import Links, Nodes, links, ring
from lowprec_train.comm.process_group import DistributedGroup

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # one call; torch 2.13 has renamed it


class Reduced(NamedTuple):
    """total: FP32 [layout.size]. at_maximum: how many codes of the sums that this rank made are at the maximum,
    0-dim int64; None where sums are in FP32. of_nodes: the sums inside this node that this rank encoded again, FP32
    [nodes, size of a row].
    """

    total: Tensor
    at_maximum: Tensor | None = None
    of_nodes: Tensor | None = None


GroupByNode = dist.ProcessGroup | Nodes | None


@torch.no_grad()
def reduce_scatter(
    flat: Tensor,
    group: GroupByNode,
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
        group: process group, or its ranks by node; None is the default group, on one node.
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
    nodes = _by_node(group, codec)
    rows, out = _rows(flat, nodes.ranks, layout, op), _sums(out, flat, layout)
    if nodes.ranks == 1:
        return Reduced(out.copy_(rows[0]))
    scales = codec.scales(rows, layout, DistributedGroup.of(nodes.whole), mu)
    parts, row = codec.wire_layout(layout).pieces(rows), codec.wire_layout(layout)
    return _scattered(parts, out, nodes, codec, row, scales)


@torch.no_grad()
def all_reduce(
    flat: Tensor,
    group: GroupByNode,
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
    nodes = _by_node(group, codec)
    rows, out = _rows(flat, 1, layout, op), _sums(out, flat, layout)
    if nodes.ranks == 1:
        return Reduced(out.copy_(rows[0]))
    scales = codec.scales(rows, layout, DistributedGroup.of(nodes.whole), mu)
    layout = codec.wire_layout(layout)
    mine, sums = layout.pieces(rows[0]), layout.pieces(out)
    if codec.sends_whole(layout, nodes.ranks):
        wire = _gathered(codec.encode(mine, 1, layout, scales), nodes.whole)
        codec.decode(wire, sums, layout, scales, senders=nodes.ranks)
        return Reduced(out)
    row = layout.split(nodes.ranks, codec.block)
    summed = _scattered(mine, out.new_empty(row.size), nodes, codec, row, scales)
    wire = codec.encode(row.pieces(summed.total), 1, row, scales)
    if nodes.inside is None:
        codec.decode(_gathered(wire, nodes.whole), sums, row, scales)
    else:
        wire = _gathered(_gathered(wire, nodes.across), nodes.inside)
        codec.decode(wire, sums, row, scales, inner=nodes.node)
    return summed._replace(total=out)


def reduce_scatter_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter of rows of `layout`; maxima and counts of a shared scale aside."""
    return (ranks - 1) * codec.row_bytes(layout)


def all_reduce_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Bytes that each rank sends in an all-reduce of `layout`; maxima and counts of a shared scale aside."""
    if codec.sends_whole(layout, ranks):
        return (ranks - 1) * codec.row_bytes(layout)
    return 2 * (ranks - 1) * codec.row_bytes(codec.wire_layout(layout).split(ranks, codec.block))


def reduce_scatter_links(codec: GradCodec, layout: FlatLayout, ranks: int, node: int) -> Links:
    """`reduce_scatter_bytes` by what they travel over, where `node` ranks share a node."""
    return links(codec.row_bytes(layout), ranks, node, flat=codec.shares_scales)


def all_reduce_links(codec: GradCodec, layout: FlatLayout, ranks: int, node: int) -> Links:
    """`all_reduce_bytes` by what they travel over."""
    if codec.sends_whole(layout, ranks):
        return ring(codec.row_bytes(layout), ranks, node)
    row = codec.row_bytes(codec.wire_layout(layout).split(ranks, codec.block))
    scattered = links(row, ranks, node, flat=codec.shares_scales)
    return scattered.plus(ring(row, ranks, node) if codec.shares_scales else links(row, ranks, node))


def _by_node(group: GroupByNode, codec: GradCodec) -> Nodes:
    """Sums under a shared scale are made of all ranks' codes at once."""
    nodes = group if isinstance(group, Nodes) else Nodes.one(group)
    return replace(nodes, inside=None, across=None) if codec.shares_scales else nodes


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
    nodes: Nodes,
    codec: GradCodec,
    row: FlatLayout,
    scales: Tensor | None,
) -> Reduced:
    """The sum over ranks of this rank's row, in `out`."""
    if nodes.inside is not None:
        return _scattered_by_node(parts, out, nodes, codec, row)
    wire = _exchanged(codec.encode(parts, nodes.ranks, row, scales), nodes.whole)
    return Reduced(out, codec.decode(wire, row.pieces(out), row, scales, senders=nodes.ranks))


def _scattered_by_node(
    parts: tuple[Tensor, ...], out: Tensor, nodes: Nodes, codec: GradCodec, row: FlatLayout
) -> Reduced:
    """Sums inside the node, of a row for this rank's number on every node, then between nodes."""
    wire = _exchanged(codec.encode(parts, nodes.ranks, row, inner=nodes.node), nodes.inside)
    of_nodes = out.new_empty(nodes.count, row.size)
    codec.decode(wire, row.pieces(of_nodes), row, senders=nodes.node)
    wire = _exchanged(codec.encode(row.pieces(of_nodes), nodes.count, row), nodes.across)
    codec.decode(wire, row.pieces(out), row, senders=nodes.count)
    return Reduced(out, of_nodes=of_nodes)


def _exchanged(wire: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Equal parts of a wire, one to each rank, for those of every rank, in rank order."""
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    return arrived


def _gathered(wire: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[rows, bytes] of every rank, one after the other."""
    arrived = wire.new_empty((dist.get_world_size(group) * len(wire), wire.shape[1]))
    ALL_GATHER(arrived, wire, group=group)
    return arrived
