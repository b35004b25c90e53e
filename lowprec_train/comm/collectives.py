"""Reduce-scatter and all-reduce of gradients with a low-precision payload and FP32 sums.

    reduce_scatter   encode | all-to-all of bytes | decode, sum in FP32 in rank order
    all_reduce       reduce_scatter, then one more encode | all-gather | decode

or, where that sends no more bytes (always on two ranks), `all_reduce` gathers every contribution whole and sums them
all everywhere: one rounding instead of two. `sends_whole` decides, from sizes that all ranks know.

Messages are cut in segments: while one is on the wire the next is encoded and the one before it summed. Only uint8
travels (gloo knows no FP8, and a network that reduced byte views would add codes). Every rank adds in rank order, so
results are the same bits on every rank and for every segment size. With one rank nothing is rounded.

Sums, never averages: FSDP2 hands a custom reduce-scatter AVG unless `set_force_sum_reduction_for_comms(True)` is set,
and a factor that is applied twice, or never, is silent. Divide where the loss is defined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.layout import Layout
from lowprec_train.comm.payload import Payload
from lowprec_train.comm.shared_scale import SharedScale

SEGMENT = 1 << 25  # elements of a row in one message: a message costs the host about 0.7 ms, whatever its size
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # one call; torch 2.13 has renamed it
IN_FLIGHT = 2  # messages: one on the wire while its neighbours are encoded and summed


@torch.no_grad()
def reduce_scatter(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    payload: Payload,
    layout: Layout,
    *,
    op: Any = dist.ReduceOp.SUM,
    segment: int = SEGMENT,
) -> Tensor:
    """The sum over ranks of this rank's row.

    Args:
        flat: [ranks * layout.size], any float dtype: row r is summed for rank r.
        group: process group; None is the default one.
        payload: what a contribution looks like on the wire.
        layout: the spans of one row; the same on every rank.
        op: must be SUM.
        segment: elements of a row per message, a multiple of the payload's block. It changes no bit.

    Returns:
        FP32 [layout.size]. A non-finite element of any rank makes its block NaN there (Inf and NaN as they are where
        they travel in BF16), on the rank that owns it, as in any reduce-scatter.

    Raises:
        ValueError: another `op`, sizes that do not fit together, or a flat tensor that is not of a float dtype.
    """
    ranks = dist.get_world_size(group)
    rows = _rows(flat, ranks, layout, op)
    if ranks == 1:
        return rows[0].float().clone()
    parts = _segments(payload.wire_layout(layout), payload, segment)
    return _reduce_rows(rows, group, payload, parts)


@torch.no_grad()
def all_reduce(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    payload: Payload,
    layout: Layout,
    *,
    op: Any = dist.ReduceOp.SUM,
    segment: int = SEGMENT,
) -> Tensor:
    """The sum over ranks, the same bits on each. flat: [layout.size]; other arguments and errors as `reduce_scatter`.

    Returns FP32 [layout.size]. A non-finite element of any rank makes its block NaN on every rank.
    """
    ranks = dist.get_world_size(group)
    _rows(flat, 1, layout, op)
    if ranks == 1:
        return flat.float().clone()
    layout = payload.wire_layout(layout)
    if sends_whole(payload, layout, ranks):
        whole = _gathered(flat[None], group, payload, _segments(layout, payload, segment))
        return torch.cat([payload.decode_sum(wire, part) for wire, part in whole])
    shard = layout.split(ranks, payload.block)
    parts = _segments(shard, payload, segment)
    mine = _reduce_rows(layout.scatter(flat, ranks, payload.block), group, payload, parts)
    sums = _gathered(mine[None], group, payload, parts)
    return layout.gather(torch.cat([payload.decode(wire, part) for wire, part in sums], dim=1), payload.block)


@torch.no_grad()
def reduce_scatter_shared(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    payload: SharedScale,
    layout: Layout,
    mu: Tensor,
    *,
    op: Any = dist.ReduceOp.SUM,
) -> tuple[Tensor, Tensor]:
    """`reduce_scatter` with FP8-LM's shared scale and FP8 sum.

    Args:
        mu: head-room in [1/ranks, 1], 0-dim FP32, the same on every rank (`MuSchedule.mu`).

    Returns:
        (FP32 [layout.size], the share of all ranks' codes at the maximum: 0-dim FP32, for `MuSchedule.update`). A
        non-finite element of any rank makes its parameter NaN on every rank.
    """
    ranks = dist.get_world_size(group)
    rows = _rows(flat, ranks, layout, op)
    if ranks == 1:
        return rows[0].float().clone(), torch.zeros((), device=flat.device)
    multiplier = _agreed(rows, group, payload, layout, mu)
    codes, plain, at_maximum = _added(rows, group, payload, layout, multiplier)
    share = at_maximum / max(1, ranks * layout.coded_size)
    return payload.scale_back(codes[None], plain[None], layout, multiplier)[0], share


@torch.no_grad()
def all_reduce_shared(
    flat: Tensor,
    group: dist.ProcessGroup | None,
    payload: SharedScale,
    layout: Layout,
    mu: Tensor,
    *,
    op: Any = dist.ReduceOp.SUM,
) -> tuple[Tensor, Tensor]:
    """`all_reduce` with FP8-LM's shared scale and FP8 sum, whose codes are gathered without another rounding.

    flat: [layout.size]; other arguments, results and errors as `reduce_scatter_shared`.
    """
    ranks = dist.get_world_size(group)
    _rows(flat, 1, layout, op)
    if ranks == 1:
        return flat.float().clone(), torch.zeros((), device=flat.device)
    multiplier = _agreed(flat[None], group, payload, layout, mu)
    shard = layout.split(ranks, 1)
    codes, plain, at_maximum = _added(layout.scatter(flat, ranks, 1), group, payload, shard, multiplier)
    wire, work = _start_gather(payload.encode_sum(codes, plain), group)
    work.wait()
    return layout.gather(payload.decode(wire, shard, multiplier), 1), at_maximum / max(1, layout.coded_size)


def sends_whole(payload: Payload, layout: Layout, ranks: int) -> bool:
    """Whether `all_reduce` gathers whole contributions: when that sends no more bytes than its two steps."""
    shard = payload.wire_layout(layout).split(ranks, payload.block)
    return payload.row_bytes(layout) <= 2 * payload.row_bytes(shard)


def reduce_scatter_bytes(payload: Payload | SharedScale, layout: Layout, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter of rows of `layout`; maxima and counts of a shared scale aside."""
    return (ranks - 1) * payload.row_bytes(layout)


def all_reduce_bytes(payload: Payload | SharedScale, layout: Layout, ranks: int) -> int:
    """Bytes that each rank sends in an all-reduce of `layout`; maxima and counts of a shared scale aside."""
    if isinstance(payload, SharedScale):
        return 2 * (ranks - 1) * payload.row_bytes(layout.split(ranks, 1))
    if sends_whole(payload, layout, ranks):
        return (ranks - 1) * payload.row_bytes(layout)
    return 2 * (ranks - 1) * payload.row_bytes(payload.wire_layout(layout).split(ranks, payload.block))


def _rows(flat: Tensor, ranks: int, layout: Layout, op: Any) -> Tensor:
    if op != dist.ReduceOp.SUM:
        raise ValueError(f"gradients are summed; {op} is not a sum (FSDP2: set_force_sum_reduction_for_comms(True))")
    if flat.numel() != ranks * layout.size:
        raise ValueError(f"{flat.numel()} elements are not {ranks} rows of {layout.size}")
    if not flat.is_floating_point():
        raise ValueError(f"gradients are floating point, not {flat.dtype}")
    return flat.view(ranks, layout.size)


def _segments(layout: Layout, payload: Payload, limit: int) -> list[Layout]:
    if limit < payload.block or limit % payload.block:
        raise ValueError(f"a segment is a multiple of the block of {payload.block} elements, not {limit}")
    return layout.segments(limit)


def _reduce_rows(rows: Tensor, group: dist.ProcessGroup | None, payload: Payload, parts: list[Layout]) -> Tensor:
    """FP32 sum over ranks of this rank's row."""
    pieces = zip(rows.split([part.size for part in parts], dim=1), parts)
    encoded = (payload.encode(piece, part) for piece, part in pieces)
    arrived = _pipeline(encoded, lambda wire: _start_exchange(wire, group))
    return torch.cat([payload.decode_sum(wire, part) for wire, part in zip(arrived, parts)])


def _gathered(
    row: Tensor, group: dist.ProcessGroup | None, payload: Payload, parts: list[Layout]
) -> Iterator[tuple[Tensor, Layout]]:
    """Every rank's row [1, size] as bytes [ranks, row_bytes], segment by segment."""
    pieces = zip(row.split([part.size for part in parts], dim=1), parts)
    encoded = (payload.encode(piece, part) for piece, part in pieces)
    return zip(_pipeline(encoded, lambda wire: _start_gather(wire, group)), parts)


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
    return arriving, GATHER(arriving, wire, group=group, async_op=True)


def _agreed(rows: Tensor, group: dist.ProcessGroup | None, payload: SharedScale, layout: Layout, mu: Tensor) -> Tensor:
    """The multiplier of each span that all ranks share."""
    amax = payload.amax(rows, layout)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return payload.multiplier(amax, mu)


def _added(
    rows: Tensor, group: dist.ProcessGroup | None, payload: SharedScale, layout: Layout, multiplier: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and plain sums of this rank's row, and how many codes of all ranks are at the maximum."""
    wire, work = _start_exchange(payload.encode(rows, layout, multiplier), group)
    work.wait()
    codes, plain, at_maximum = payload.add(wire, layout)
    dist.all_reduce(at_maximum, group=group)
    return codes, plain, at_maximum
