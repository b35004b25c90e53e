"""Reduce-scatter and all-reduce of gradients in a codec's wire format.

    reduce_scatter   encode, unless elements are sent as they lie | all-to-all of bytes | decode and sum in rank order
                     or: encode | decode and sum, which reads the other GPUs' memory (symmetric_memory.py)
    all_reduce       reduce_scatter, then encode again | all-gather | decode

If the codec chooses so, from sizes that all ranks know (`GradCodec.sends_whole`), `all_reduce` instead gathers every
whole contribution and every rank sums them: one rounding instead of two.

A step is one operation for all parameters and ranks; without an encode, gloo exchanges them one by one. Only uint8 is
sent: gloo has no FP8, and a network that reduces byte views would add codes. Every rank adds in rank order, so results
have the same bits on every rank. With one rank nothing is rounded. If the ranks are on several nodes, sums are made
inside each node first, encoded again, and exchanged between nodes (nodes.py).

Reductions are sums, never averages: a factor that is applied twice, or never, raises no error. Divide where the loss is
defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.nodes import Links, Nodes, links, ring
from lowprec_train.comm.process_group import ALL_GATHER, DistributedGroup, all_to_all_each
from lowprec_train.comm.symmetric_memory import PeerRows


class Reduced(NamedTuple):
    """total: FP32 [layout.size]. at_maximum: number of codes at the maximum in the sums that this rank made, 0-dim
    int64; None if sums are in FP32. of_nodes: the sums inside this node that this rank encoded again, FP32 [nodes, size
    of a row].
    """

    total: Tensor
    at_maximum: Tensor | None = None
    of_nodes: Tensor | None = None


GroupByNode = dist.ProcessGroup | Nodes | None


@torch.no_grad()
def reduce_scatter(
    given: Tensor | Sequence[Tensor],
    group: GroupByNode,
    codec: GradCodec,
    layout: FlatLayout,
    *,
    mu: Tensor | None = None,
    out: Tensor | None = None,
    peers: PeerRows | None = None,
) -> Reduced:
    """Return the sum over ranks of this rank's row.

    Args:
        given: [ranks * layout.size], any float dtype: row r is summed for rank r. Or, for a codec with its own scales,
            a tensor for each range of `layout`: its elements of all rows (`GradCodec`), all in one dtype.
        group: process group, or its ranks by node; None: the default group, on one node.
        codec: the wire format of a contribution; the same on every rank.
        layout: the ranges of one row; the same on every rank.
        mu: head-room of a codec that shares scales, 0-dim FP32 in [1/ranks, 1] (`MuSchedule.mu`).
        out: FP32 [layout.size] for the sum; None: it is allocated.
        peers: memory that all ranks of the group read, for a codec with its own scales and ranks on one node; None:
            encoded rows are sent. Elements that are sent as they lie are sent in either case.

    Returns:
        The sum. A non-finite element of any rank makes its block NaN on the rank that owns it, as in any reduce-scatter
        (BF16 keeps Inf and NaN); under a shared scale it makes its parameter NaN on every rank.
    Raises:
        ValueError: sizes that do not fit together, elements without a float dtype, an `out` that is not FP32, `peers`
        for several nodes or for a shared scale.
    """
    nodes, row, scales = _by_node(group, codec), codec.wire_layout(layout), None
    if peers is not None and (nodes.inside is not None or codec.shares_scales):
        raise ValueError(f"ranks read each other's rows on one node and with their own scales, not {codec}")
    if isinstance(given, Tensor):
        rows, out = _rows(given, nodes.ranks, layout), _sums(out, given, layout)
        parts, of_parts = row.pieces(rows), row
        if nodes.ranks > 1:
            scales = codec.scales(rows, layout, DistributedGroup.of(nodes.whole), mu)
    else:
        parts, of_parts, out = _ranges(given, nodes.ranks, layout), layout, _sums(out, given[0], layout)
    if nodes.ranks == 1:
        for part, piece in zip(parts, of_parts.pieces(out), strict=True):
            piece.copy_(part.view(-1))
        return Reduced(out)
    if peers is not None and not codec.sends_unchanged(parts, nodes.ranks, of_parts):
        width = codec.row_bytes(layout)
        codec.encode(parts, nodes.ranks, of_parts, out=peers.to_write(width))
        codec.decode(peers.to_read(width), row.pieces(out), row, senders=nodes.ranks)
        return Reduced(out)
    return _scattered(parts, of_parts, out, nodes, codec, row, scales)


@torch.no_grad()
def all_reduce(
    flat: Tensor,
    group: GroupByNode,
    codec: GradCodec,
    layout: FlatLayout,
    *,
    mu: Tensor | None = None,
    out: Tensor | None = None,
) -> Reduced:
    """Return the sum over ranks, with the same bits on each. flat: [layout.size]; out may be `flat`; other arguments
    and errors as in `reduce_scatter`.

    A non-finite element of any rank makes its block NaN on every rank; under a shared scale, its parameter.
    """
    nodes = _by_node(group, codec)
    rows, out = _rows(flat, 1, layout), _sums(out, flat, layout)
    if nodes.ranks == 1:
        return Reduced(out.copy_(rows[0]))
    scales = codec.scales(rows, layout, DistributedGroup.of(nodes.whole), mu)
    layout = codec.wire_layout(layout)
    parts, sums = layout.pieces(rows[0]), layout.pieces(out)
    if codec.sends_whole(layout, nodes.ranks):
        wire = _gathered(codec.encode(parts, 1, layout, scales), nodes.whole)
        codec.decode(wire, sums, layout, scales, senders=nodes.ranks)
        return Reduced(out)
    row = layout.split(nodes.ranks, codec.block)
    summed = _scattered(parts, row, out.new_empty(row.size), nodes, codec, row, scales)
    wire = codec.encode(row.pieces(summed.total), 1, row, scales)
    if nodes.inside is None:
        codec.decode(_gathered(wire, nodes.whole), sums, row, scales)
    else:
        wire = _gathered(_gathered(wire, nodes.across), nodes.inside)
        codec.decode(wire, sums, row, scales, inner=nodes.node)
    return summed._replace(total=out)


def reduce_scatter_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Return the bytes that each rank sends in a reduce-scatter of `layout`, without a shared scale's maxima."""
    return (ranks - 1) * codec.row_bytes(layout)


def all_reduce_bytes(codec: GradCodec, layout: FlatLayout, ranks: int) -> int:
    """Return the bytes that each rank sends in an all-reduce of `layout`, without a shared scale's maxima."""
    if codec.sends_whole(layout, ranks):
        return (ranks - 1) * codec.row_bytes(layout)
    return 2 * (ranks - 1) * codec.row_bytes(codec.wire_layout(layout).split(ranks, codec.block))


def reduce_scatter_links(codec: GradCodec, layout: FlatLayout, ranks: int, node: int) -> Links:
    """Return `reduce_scatter_bytes` by kind of link, with `node` ranks per node."""
    return links(codec.row_bytes(layout), ranks, node, flat=codec.shares_scales)


def all_reduce_links(codec: GradCodec, layout: FlatLayout, ranks: int, node: int) -> Links:
    """Return `all_reduce_bytes` by kind of link, with `node` ranks per node."""
    if codec.sends_whole(layout, ranks):
        return ring(codec.row_bytes(layout), ranks, node)
    row = codec.row_bytes(codec.wire_layout(layout).split(ranks, codec.block))
    scattered = links(row, ranks, node, flat=codec.shares_scales)
    return scattered.plus(ring(row, ranks, node) if codec.shares_scales else links(row, ranks, node))


def _by_node(group: GroupByNode, codec: GradCodec) -> Nodes:
    """Return the ranks by node; for a shared scale as one node, because its sums need all ranks' codes at once."""
    nodes = group if isinstance(group, Nodes) else Nodes.one(group)
    return replace(nodes, inside=None, across=None) if codec.shares_scales else nodes


def _rows(flat: Tensor, ranks: int, layout: FlatLayout) -> Tensor:
    if flat.numel() != ranks * layout.size:
        raise ValueError(f"{flat.numel()} elements are not {ranks} rows of {layout.size}")
    _check_dtype(flat)
    return flat.view(ranks, layout.size)


def _check_dtype(x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"gradients are floating point, not {x.dtype}")


def _sums(out: Tensor | None, flat: Tensor, layout: FlatLayout) -> Tensor:
    if out is None:
        return torch.empty(layout.size, device=flat.device)
    if out.shape != (layout.size,) or out.dtype != torch.float32:
        raise ValueError(f"sums are FP32 [{layout.size}], not {out.dtype} {list(out.shape)}")
    return out


def _ranges(parts: Sequence[Tensor], ranks: int, layout: FlatLayout) -> tuple[Tensor, ...]:
    if len(parts) != len(layout.ranges):
        raise ValueError(f"{len(parts)} tensors are not {len(layout.ranges)} ranges")
    for part, each in zip(parts, layout.ranges):
        if part.numel() > ranks * each.size:
            raise ValueError(f"{part.numel()} elements are not {ranks} rows of {each.size}")
        _check_dtype(part)
    return tuple(parts)


def _scattered(
    parts: tuple[Tensor, ...],
    of_parts: FlatLayout,
    out: Tensor,
    nodes: Nodes,
    codec: GradCodec,
    row: FlatLayout,
    scales: Tensor | None,
) -> Reduced:
    """Write the sum over ranks of this rank's row to `out`. of_parts: a row with a range for each part; row: as it is
    sent.
    """
    if nodes.inside is not None:
        return _scattered_by_node(parts, of_parts, out, nodes, codec, row)
    if codec.sends_unchanged(parts, nodes.ranks, of_parts):
        wire, sums = _exchanged_each(parts, nodes), of_parts.pieces(out)
        return Reduced(out, codec.decode(wire, sums, of_parts, senders=nodes.ranks, by_range=True))
    wire = _exchanged(codec.encode(parts, nodes.ranks, of_parts, scales), nodes.whole)
    return Reduced(out, codec.decode(wire, row.pieces(out), row, scales, senders=nodes.ranks))


def _scattered_by_node(
    parts: tuple[Tensor, ...], of_parts: FlatLayout, out: Tensor, nodes: Nodes, codec: GradCodec, row: FlatLayout
) -> Reduced:
    """Sum inside the node, one row for this rank's number on every node; then sum between nodes."""
    wire = _exchanged(codec.encode(parts, nodes.ranks, of_parts, inner=nodes.node), nodes.inside)
    of_nodes = out.new_empty(nodes.count, row.size)
    codec.decode(wire, row.pieces(of_nodes), row, senders=nodes.node)
    wire = _exchanged(codec.encode(row.pieces(of_nodes), nodes.count, row), nodes.across)
    codec.decode(wire, row.pieces(out), row, senders=nodes.count)
    return Reduced(out, of_nodes=of_nodes)


def _exchanged(wire: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send equal parts of a wire to all ranks; return the parts from every rank, in rank order."""
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    return arrived


def _exchanged_each(parts: Sequence[Tensor], nodes: Nodes) -> Tensor:
    """Send equal parts of each tensor to all ranks; return the bytes from every rank, one tensor after the other."""
    sent = [part.view(torch.uint8).view(-1) for part in parts]
    arrived = sent[0].new_empty(sum(each.numel() for each in sent))
    all_to_all_each(list(zip(arrived.split([each.numel() for each in sent]), sent)), nodes.whole)
    return arrived.view(nodes.ranks, -1)


def _gathered(wire: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return [rows, bytes] of every rank, one after the other."""
    arrived = wire.new_empty((dist.get_world_size(group) * len(wire), wire.shape[1]))
    ALL_GATHER(arrived, wire, group=group)
    return arrived
