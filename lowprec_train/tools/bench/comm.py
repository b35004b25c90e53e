"""`lowprec bench comm`: time of gradient reductions by codec, compared with the library's in FP32 and BF16.

All start from a flat buffer of one layer's gradients on every rank and end in FP32. The buffer is FP32, as sums of
micro-batches are, or BF16, as gradients that are sent at once are. Casts are timed: two of a library sum in BF16 of
FP32 gradients, that of BF16 gradients to FP32, which FSDP2 makes before it sums them in FP32, and that of a sum in BF16
to FP32. The library's all-reduce of BF16 sums a copy in place. Contestants take
turns, one call per round, and all ranks start together. The time of a call is that of the slowest rank. It includes the
host's time to launch it, unless all calls are recorded as CUDA graphs.

The SQNR of each result is measured once: 10 log10 of the signal over the error, relative to an FP32 sum; None for
bit-equal results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm import collectives
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.grad_codec import GradCodec, sqnr_db
from lowprec_train.comm.layout import FlatLayout, sharded_layout
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.comm.symmetric_memory import SymmetricRows
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Interval
from lowprec_train.train import build, launch
from lowprec_train.train.compose import composed
from lowprec_train.train.cuda_graph import prepare_nccl

KINDS = ("reduce_scatter", "all_reduce")
BASELINE = "library BF16"
EXACT = "FP32"

Reduce = Callable[[Tensor], Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """reduce: flat FP32 or BF16 -> FP32. sent: bytes that a rank sends."""

    kind: str
    name: str
    reduce: Reduce
    sent: int


class Recorded:
    """A reduction as a CUDA graph, recorded on a stream of its own. flat: its input, which each call reads again. Its
    memory belongs to the graph.
    """

    def __init__(self, reduce: Reduce, flat: Tensor) -> None:
        stream = torch.cuda.Stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            reduce(flat)  # allocates and compiles what stays
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._total = reduce(flat)
        self._flat = flat

    def __call__(self, flat: Tensor) -> Tensor:
        assert flat is self._flat, "a graph reads the tensor with which it was recorded"
        self._graph.replay()
        return self._total


def layer(model: str) -> Shapes:
    """Return the shapes of the matrices in the first block of a model configuration."""
    laid_out: Transformer = build.layout(composed(f"model={model}")).model
    named = laid_out.blocks[0].named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named if parameter.ndim >= 2}


def measure(
    device: torch.device,
    shapes: Shapes,
    *,
    gradients: Format = FP32,
    rounds: int = 20,
    warm_up: int = 3,
    cuda_graph: bool = False,
) -> dict[str, Any]:
    """Return rows by collective and codec, the same on every rank. All ranks of the default group must call it.

    gradients: format of the buffer that is reduced, FP32 or BF16. cuda_graph: record each call. Raises ValueError for
    that without a GPU.
    """
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"--cuda-graph needs CUDA GPUs, and this is --device {device.type}")
    if cuda_graph:
        prepare_nccl()
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        ranks = dist.get_world_size()
        layout = sharded_layout(shapes, ranks if kind == "reduce_scatter" else 1)
        elements = layout.size * (ranks if kind == "reduce_scatter" else 1)
        flat = random_gradients(elements, device).to(gradients.carrier)
        rows += _turns(contestants(kind, layout, ranks, device), flat, device, rounds, warm_up, cuda_graph)
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    about = {"ranks": dist.get_world_size(), "backend": str(dist.get_backend()), "elements": elements}
    return about | {"gradients": gradients.name, "rounds": rounds, "cuda_graph": cuda_graph, "rows": compared(rows)}


def random_gradients(size: int, device: torch.device) -> Tensor:
    """Return FP32 normal values with standard deviation 1e-3, different on each rank."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    return torch.randn(size, generator=generator, device=device).mul_(1e-3)


def contestants(kind: str, layout: FlatLayout, ranks: int, device: torch.device) -> list[Contestant]:
    """Return the contestants. The first is FP32 in rank order, the reference of the others. On GPUs that share a node,
    FP8 is reduced through symmetric memory too.
    """
    sent_by = getattr(collectives, f"{kind}_bytes")
    codecs: dict[str, GradCodec] = {format.name: BlockScaledCodec(format) for format in (FP32, BF16, E4M3, E5M2)}
    codecs["shared-scale E4M3"] = SharedScaleCodec()
    mu = torch.tensor(1.0 / ranks, device=device)  # no value saturates
    collective = getattr(collectives, kind)
    *found, shared = [
        Contestant(
            kind=kind,
            name=name,
            reduce=lambda flat, codec=codec: collective(flat, None, codec, layout, mu=mu).total,  # type: ignore[misc]
            sent=sent_by(codec, layout, ranks),
        )
        for name, codec in codecs.items()
    ]
    if kind == "reduce_scatter" and device.type == "cuda" and launch.world().local_processes == ranks:
        found += [_read_by_peers(codecs[name], layout, ranks, device) for name in ("E4M3", "E5M2")]
    return [*found, *(_library(kind, layout, ranks, format.carrier) for format in (FP32, BF16)), shared]


def _read_by_peers(codec: GradCodec, layout: FlatLayout, ranks: int, device: torch.device) -> Contestant:
    """Return a reduce-scatter whose ranks read each other's memory; the bytes are those that other ranks read."""

    @cache
    def peers() -> SymmetricRows:
        return SymmetricRows(ranks * codec.row_bytes(layout), None, device)

    def reduce(flat: Tensor) -> Tensor:
        return collectives.reduce_scatter(flat, None, codec, layout, peers=peers()).total

    sent = collectives.reduce_scatter_bytes(codec, layout, ranks)
    return Contestant(kind="reduce_scatter", name=f"{codec}, symmetric memory", reduce=reduce, sent=sent)


def _library(kind: str, layout: FlatLayout, ranks: int, dtype: torch.dtype) -> Contestant:
    """Return the sum by NCCL or gloo."""

    def reduce(flat: Tensor) -> Tensor:
        if kind == "all_reduce":
            sent = flat.to(dtype, copy=True)  # summed in place
            dist.all_reduce(sent)
            return sent.float()
        sent = flat.to(dtype)
        row = sent.new_empty(layout.size)
        dist.reduce_scatter_tensor(row, sent)
        return row.float()

    bytes_of_row = layout.size * dtype.itemsize
    sent = (ranks - 1) * bytes_of_row if kind == "reduce_scatter" else 2 * (ranks - 1) * bytes_of_row // ranks
    name = f"library {'FP32' if dtype is torch.float32 else 'BF16'}"
    return Contestant(kind=kind, name=name, reduce=reduce, sent=sent)


def _turns(
    found: Sequence[Contestant], flat: Tensor, device: torch.device, rounds: int, warm_up: int, cuda_graph: bool
) -> list[dict[str, Any]]:
    """Return a row for each contestant. A failure occurs on all ranks: sizes and back end are the same."""
    rows = {each.name: {"kind": each.kind, "name": each.name, "sent": each.sent} for each in found}
    exact, alive = found[0].reduce(flat), []
    for each in found:
        try:
            result = [each.reduce(flat) for _ in range(warm_up)][-1]
            if cuda_graph:
                each = replace(each, reduce=Recorded(each.reduce, flat))
                result = each.reduce(flat)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            rows[each.name]["error"] = cause(error)
            continue
        rows[each.name]["sqnr_db"] = decibels if math.isfinite(decibels := float(sqnr_db(exact, result))) else None
        alive.append(each)
    times: dict[str, list[float]] = {each.name: [] for each in alive}
    for _ in range(rounds):
        for each in alive:
            times[each.name].append(_slowest(each, flat, device))
    for name, taken in times.items():
        rows[name] |= {"ms": statistics.median(taken), "times_ms": taken}
    return list(rows.values())


def _slowest(contestant: Contestant, flat: Tensor, device: torch.device) -> float:
    """Return the milliseconds of one call on the slowest rank."""
    dist.barrier()
    with Interval(device) as interval:
        contestant.reduce(flat)
    taken = torch.tensor(interval.ms, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows the GB/s that a rank sends, and the speed relative to the library's BF16."""
    timed = [dict(row) for row in rows]
    baseline = {row["kind"]: row["ms"] for row in timed if row["name"] == BASELINE and "ms" in row}
    for row in (row for row in timed if "ms" in row):
        row["gbs"] = row["sent"] / row["ms"] / 1e6
        if row["kind"] in baseline:
            row["of_library"] = baseline[row["kind"]] / row["ms"]
    return timed
