"""Reduce-scatter and all-reduce of gradients in a codec's wire format.

    reduce_scatter   encode | all-to-all of bytes | decode and sum in rank order
    all_reduce       reduce_scatter, then one more encode | all-gather | decode

or, where the codec says so (`GradCodec.sends_whole`, from sizes that all ranks know), `all_reduce` gathers every
contribution whole and sums them all everywhere: one rounding instead of two.

Messages are cut in chunks: while one is on the wire the next is encoded and the one before it summed. Only uint8
travels (gloo knows no FP8, and a network that reduced byte views would add codes). Every rank adds in rank order, so
results are the same bits on every rank and for every chunk size. With one rank nothing is rounded.

Sums, never averages: FSDP2 hands a custom reduce-scatter AVG unless `set_force_sum_reduction_for_comms(True)` is set,
and a factor that is applied twice, or never, is silent. Divide where the loss is defined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.process_group import DistributedGroup

CHUNK = 1 << 25  # elements of a row in one message: a message costs the host about 0.7 ms, whatever its size
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # one call; torch 2.13 has renamed it
IN_FLIGHT = 2  # messages: one on the wire while its neighbours are encoded and summed


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
    chunk: int = CHUNK,
) -> Reduced:
    """The sum over ranks of this rank's row.

    Args:
        flat: [ranks * layout.size], any float dtype: row r is summed for rank r.
        group: process group; None is the default one.
        codec: what a contribution looks like on the wire; the same on every rank.
        layout: the ranges of one row; the same on every rank.
        mu: head-room of a codec that shares scales, 0-dim FP32 in [1/ranks, 1] (`MuSchedule.mu`).
        op: must be SUM.
        chunk: elements of a row per message, a multiple of the codec's block. It changes no bit.

    Returns:
        A non-finite element of any rank makes its block NaN (Inf and NaN as they are where they travel in BF16) on the
        rank that owns it, as in any reduce-scatter; under a shared scale its parameter, on every rank.

    Raises:
        ValueError: another `op`, sizes that do not fit together, or a flat tensor that is not of a float dtype.
    """
    ranks = dist.get_world_size(group)
    rows = _rows(flat, ranks, layout, op)
    if ranks == 1:
        return Reduced(rows[0].float().clone())
    scales = codec.scales(rows, layout, DistributedGroup.of(group), mu)
    parts = codec.chunks(codec.wire_layout(layout), chunk)
    return _sum_rows(rows, group, codec, parts, scales, ranks * layout.coded_size)


@torch.no_grad()
def all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    codec: GradCodec,
    layout: FlatLayout,
    *,
    mu: Tensor | None = None,
    op: Any = dist.ReduceOp.SUM,
    chunk: int = CHUNK,
) -> Reduced:
    """The sum over ranks, the same bits on each. flat: [layout.size]; other arguments and errors as `reduce_scatter`.

    A non-finite element of any rank makes its block NaN on every rank, its parameter under a shared scale.
    """
    ranks = dist.get_world_size(group)
    rows = _rows(flat, 1, layout, op)
    if ranks == 1:
        return Reduced(flat.float().clone())
    scales = codec.scales(rows, layout, DistributedGroup.of(group), mu)
    codes, layout = layout.coded_size, codec.wire_layout(layout)
    if codec.sends_whole(layout, ranks):
        whole = _gathered(rows, group, codec, codec.chunks(layout, chunk), scales)
        return Reduced(torch.cat([codec.decode_sum(wire, part, scales)[0] for wire, part in whole]))
    parts = codec.chunks(layout.split(ranks, codec.block), chunk)
    mine = _sum_rows(layout.scatter(flat, ranks, codec.block), group, codec, parts, scales, codes)
    sums = _gathered(mine.total[None], group, codec, parts, scales)
    decoded = torch.cat([codec.decode(wire, part, scales) for wire, part in sums], dim=1)
    return mine._replace(total=layout.gather(decoded, codec.block))


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


def _sum_rows(
    rows: Tensor,
    group: dist.ProcessGroup | None,
    codec: GradCodec,
    parts: list[FlatLayout],
    scales: Tensor | None,
    codes: int,
) -> Reduced:
    """The sum over ranks of this rank's row. codes: of all ranks' sums."""
    arrived = _pipeline(_encoded(rows, codec, parts, scales), lambda wire: _start_exchange(wire, group))
    sums, counts = zip(*(codec.decode_sum(wire, part, scales) for wire, part in zip(arrived, parts)), strict=True)
    if not codec.shares_scales:
        return Reduced(torch.cat(sums))
    count = DistributedGroup.of(group).all_reduce_sum(torch.stack(counts).sum().double())
    return Reduced(torch.cat(sums), count.long() / max(1, codes))


def _gathered(
    row: Tensor, group: dist.ProcessGroup | None, codec: GradCodec, parts: list[FlatLayout], scales: Tensor | None
) -> Iterator[tuple[Tensor, FlatLayout]]:
    """Every rank's row [1, size] as bytes [ranks, row_bytes], chunk by chunk."""
    return zip(_pipeline(_encoded(row, codec, parts, scales), lambda wire: _start_gather(wire, group)), parts)


def _encoded(rows: Tensor, codec: GradCodec, parts: list[FlatLayout], scales: Tensor | None) -> Iterator[Tensor]:
    pieces = zip(rows.split([part.size for part in parts], dim=1), parts)
    return (codec.encode(piece, part, scales) for piece, part in pieces)


def _pipeline(messages: Iterable[Tensor], start: Callable[[Tensor], tuple[Tensor, dist.Work]]) -> Iterator[Tensor]:
    """What arrives for each message, in order, with IN_FLIGHT of them begun before the first is waited for.

    `wait` holds up the device's stream, not the host, where there is one.
    """
    begun: deque[tuple[Tensor, Tensor, dist.Work]] = deque()
    for message in messages:
        begun.append((message, *start(message)))  # the message must live until it is sent
        if len(begun) == IN_FLIGHT:
            yield _arrival(begun)
    while begun:
        yield _arrival(begun)


def _arrival(begun: deque[tuple[Tensor, Tensor, dist.Work]]) -> Tensor:
    _, arriving, work = begun.popleft()
    work.wait()
    return arriving


def _start_exchange(wire: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work]:
    """Row r of [ranks, bytes] to rank r; row i of the result is from rank i."""
    arriving = torch.empty_like(wire)
    return arriving, dist.all_to_all_single(arriving, wire, group=group, async_op=True)


def _start_gather(wire: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, dist.Work]:
    """[1, bytes] of every rank as [ranks, bytes]."""
    arriving = wire.new_empty((dist.get_world_size(group), wire.shape[1]))
    return arriving, ALL_GATHER(arriving, wire, group=group, async_op=True)
