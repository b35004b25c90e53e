"""Low-precision gradient reduction of `fully_shard` units.

    backward of a unit -> its gradients, BF16 or FP32 -> our reduce-scatter over the shard axis -> FP32 [size]
                       -> our all-reduce over the replicas -> cast to the parameter's grad_dtype -> .grad

Hybrid sharding is `fully_shard` over the shard axis plus the all-reduce: over a mesh of two dimensions FSDP2 would run
its own. A shard axis of one rank has no reduce-scatter: replication.

Reductions are sums, never averages: the loss is divided where it is defined, by the targets of the whole step.

FP32 gradients take the same path. Sums in rank order have the same bits on any back end and for any split of messages;
the order of a ring or a tree depends on the back end and on sizes. With one micro-batch per rank and one axis these
are the bits of one process that accumulates the same micro-batches. Hybrid sharding adds within shard groups first:
(g0 + g1) + (g2 + g3), not ((g0 + g1) + g2) + g3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.comm.axis import Axis
from lowprec_train.comm.block_scaled import BLOCK, BlockScaledCodec
from lowprec_train.comm.fsdp_backward import InFlight, reduce_with
from lowprec_train.comm.fsdp_units import fsdp_units, modules_of
from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout, sharded_layout
from lowprec_train.comm.nodes import Links, Nodes
from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.comm.symmetric_memory import SymmetricRows
from lowprec_train.numerics.formats import parse_format

SAMPLE_INTERVAL = 16  # steps; a measured step rounds its gradients a second time


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are sent.

    codec: of matrices.
    exclude: patterns (`*embedding*`) of names of matrices that are sent in BF16.
    node_size: processes per node, inside which sums are made first; None: as the launcher sets it.

    Raises ValueError for a node_size below 1.
    """

    codec: GradCodec
    exclude: tuple[str, ...] = ()
    node_size: int | None = None

    def __post_init__(self) -> None:
        if self.node_size is not None and self.node_size < 1:
            raise ValueError(f"comm.node_size={self.node_size}: a node has at least one process")


def encoded(
    *, format: str = "E4M3", block: int = BLOCK, exclude: Sequence[str] = (), node_size: int | None = None
) -> Reduction:
    """Return a reduction that rounds each contribution once, and each node's sum again if there are several nodes; sums
    are in FP32. Raises ValueError as `BlockScaledCodec` and `Reduction` do.
    """
    codec = BlockScaledCodec(parse_format(format), block)
    return Reduction(codec=codec, exclude=tuple(exclude), node_size=node_size)


def shared_scale(*, format: str = "E4M3", every_addition: bool = True, exclude: Sequence[str] = ()) -> Reduction:
    """Return FP8-LM's reduction: a shared scale, FP8 sums, automatic mu. Raises ValueError as `SharedScaleCodec`."""
    return Reduction(codec=SharedScaleCodec(parse_format(format), every_addition), exclude=tuple(exclude))


class UnitSum:
    """The sum of one unit's gradients over both axes, a `UnitReduction`. layout: of a row of the shard axis."""

    def __init__(self, shard: Axis, replicas: Axis, layout: FlatLayout) -> None:
        self._shard, self._layout = shard, layout
        self.all_reduce = None if replicas.ranks == 1 else partial(replicas.all_reduce, layout=layout)

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's row of the sum, FP32 [layout.size]. gradients: BF16 or FP32, in the layout's order."""
        out = torch.empty(self._layout.size, device=gradients[0].device)
        self._shard.reduce_scatter(gradients, out, self._layout)
        return out


class Sampling:
    """Selects the steps whose rounding is measured, counted from the start of the run, and stores the last SQNR. It is
    part of a checkpoint, so that a resumed run measures the same steps and rows, and repeats the value. measured: False
    measures and counts no step.

    A checkpoint with other numbers of ranks is ignored: the first step is measured.
    """

    def __init__(self, axes: Sequence[Axis], *, measured: bool = True) -> None:
        self._axes, self._measured = axes, measured
        self._ranks = torch.tensor([axis.ranks for axis in axes])
        self._steps = 0
        self._sqnr_db = torch.zeros_like(axes[0].energy[0])
        self.begin_step()

    @property
    def rounds(self) -> bool:
        """Whether the reductions round."""
        return any(axis.rounds for axis in self._axes)

    @property
    def measures(self) -> bool:
        """Whether some steps are measured."""
        return self._measured and self.rounds

    def finish_step(self, measure: Callable[[], Tensor]) -> Tensor:
        """Return the last SQNR, 0-dim FP32. `measure` returns that of this step, if it is to be measured."""
        if self.measures and self._steps % SAMPLE_INTERVAL == 0:
            self._sqnr_db = measure()
        self._steps += self._measured  # a run that goes on with measurements begins with one
        return self._sqnr_db

    def begin_step(self) -> None:
        """Start a new account on every axis."""
        number, rest = divmod(self._steps, SAMPLE_INTERVAL)
        for axis in self._axes:
            axis.begin_step(number if self.measures and not rest else None)

    def state_dict(self) -> dict[str, Any]:
        """Return ranks int64 [2], steps done 0-dim int64, the last SQNR 0-dim FP32."""
        return {"ranks": self._ranks.clone(), "steps": torch.tensor(self._steps), "sqnr_db": self._sqnr_db.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after those steps, if the numbers of ranks are the same."""
        if torch.equal(state_dict["ranks"], self._ranks):
            self._steps, self._sqnr_db = int(state_dict["steps"]), state_dict["sqnr_db"].clone()
            self.begin_step()


class Reducer:
    """The common state of a model's gradient reductions: the account of a step, and FP8-LM's head-room.

    The head-room is one number per axis. It moves once per step, by the largest share of codes at the maximum over all
    units and ranks: it is the same everywhere, in any layout, and no unit's saturation is averaged away.
    """

    def __init__(self, shard: Axis, replicas: Axis, in_flight: InFlight, *, measured: bool = True) -> None:
        self.shard, self.replicas = shard, replicas
        self._axes, self._in_flight = (shard, replicas), in_flight
        self.sampling = Sampling(self._axes, measured=measured)
        self._metrics: dict[str, Tensor | float] = {}

    @property
    def sent(self) -> tuple[Links, Links]:
        """What this rank has sent in the step so far, over shards and over replicas."""
        return self.shard.sent, self.replicas.sent

    def restore(self, sent: tuple[Links, Links]) -> None:
        """Set `sent`."""
        self.shard.sent, self.replicas.sent = sent

    def end_backward(self) -> None:
        """Wait for the last reduction, and free its gradients, after the last backward pass of a step."""
        self._in_flight.release()

    def finish_step(self) -> None:
        """Combine what all ranks sent and lost. Every rank calls it after `end_backward`."""
        self._metrics |= {"comm/grad_bytes": float(sum(sum(axis.sent) for axis in self._axes))}
        if any(axis.node < axis.ranks for axis in self._axes):
            self._metrics["comm/grad_bytes_nic"] = float(sum(axis.sent.nic for axis in self._axes))
        sqnr_db = self.sampling.finish_step(self._sqnr_db)
        if self.sampling.measures:
            self._metrics["comm/grad_sqnr_db"] = sqnr_db
        if self.sampling.rounds and self._is_shared:
            self._move_head_room()
        self.sampling.begin_step()

    def metrics(self) -> dict[str, Tensor | float]:
        """Return the metrics of the last finished step; tensors are 0-dim, on the device, the same on every rank.

        comm/grad_bytes      bytes that this rank sends, from sizes alone
        comm/grad_bytes_nic  the part that goes to other nodes; absent with one node
        comm/grad_sqnr_db    of the last measured step (every `SAMPLE_INTERVAL`); absent if nothing is
                             rounded, or no step is measured
        comm/grad_mu, comm/grad_at_maximum    of a shared scale: the smaller mu, and the largest share of codes
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the head-room of a shared scale and its numbers of ranks; empty for other codecs."""
        if not self._is_shared:
            return {}
        return {
            "level": torch.stack([axis.head_room.level for axis in self._axes]),
            "ranks": torch.tensor([axis.ranks for axis in self._axes]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue on axes with the same number of ranks; on others mu starts at 1 / ranks."""
        for axis, level, ranks in zip(self._axes, state_dict.get("level", ()), state_dict.get("ranks", ())):
            if int(ranks) == axis.ranks:
                axis.head_room.load_state_dict({"level": level})

    @property
    def _is_shared(self) -> bool:
        return self.shard.codec.shares_scales

    def _sqnr_db(self) -> Tensor:
        """Return the SQNR of all roundings relative to the first contributions."""
        energy = DistributedGroup.of(None).all_reduce_sum(torch.stack([axis.energy for axis in self._axes]))
        signal = energy[0 if self.shard.rounds else 1, 0]
        return 10 * torch.log10(signal / energy[:, 1].sum())

    def _move_head_room(self) -> None:
        shares = DistributedGroup.of(None).all_reduce_max(torch.stack([axis.at_maximum() for axis in self._axes]))
        self._metrics["comm/grad_at_maximum"] = shares.amax()
        self._metrics["comm/grad_mu"] = torch.stack([axis.head_room.mu for axis in self._axes]).amin()
        for axis, share in zip(self._axes, shares.unbind()):
            axis.head_room.update(share)


def attach(
    model: nn.Module,
    *,
    reduction: Reduction,
    shard_group: dist.ProcessGroup | Nodes | None,
    replica_group: dist.ProcessGroup | Nodes | None = None,
    measured: bool = True,
    symmetric_memory: bool = False,
) -> Reducer:
    """Reduce the gradients of every `fully_shard` unit of a model as `reduction` says, as sums in FP32.

    Args:
        model: sharded on dimension 0 over a mesh of one dimension, with MixedPrecisionPolicy(reduce_dtype=float32).
        reduction: the same on every rank.
        shard_group: of that mesh, by node if there are several. None: nothing is sharded, as with one process.
        replica_group: the ranks with the same shards. None: this rank alone.
        measured: whether the rounding of some steps is measured.
        symmetric_memory: whether the ranks of `shard_group`, GPUs of one node, read each other's encoded gradients.

    Raises:
        ValueError: a pattern of `reduction.exclude` that matches no parameter.
        RuntimeError: `symmetric_memory`, and a GPU cannot read the memory of another.
    """
    _check_patterns(reduction.exclude, [name for name, _ in model.named_parameters()])
    names = {module: name for name, module in model.named_modules()}
    units = [(unit, managed(unit, names)) for unit in fsdp_units(model)]
    devices = {p.device_mesh.device_type for _, parameters in units for p in parameters.values()}
    device, in_flight = devices.pop() if devices else "cpu", InFlight()
    shard, replicas = (Axis(group, reduction.codec, device) for group in (shard_group, replica_group))
    layouts = []
    for unit, parameters in units:
        if parameters:
            shapes = {name: parameter.shape for name, parameter in parameters.items()}
            layouts.append(sharded_layout(shapes, shard.ranks, reduction.exclude))
            reduce_with(unit, UnitSum(shard, replicas, layouts[-1]), in_flight)
    if symmetric_memory and shard.ranks > 1 and layouts:
        largest = max(shard.ranks * shard.codec.row_bytes(layout) for layout in layouts)
        of_shards = shard_group.whole if isinstance(shard_group, Nodes) else shard_group
        shard.peers = SymmetricRows(largest, of_shards, torch.device(device))
    return Reducer(shard, replicas, in_flight, measured=measured)


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"comm.exclude: no parameter is named {pattern!r}; names are {', '.join(names)}")


def managed(unit: FSDPModule, modules: Mapping[nn.Module, str]) -> dict[str, DTensor]:
    """Return the trainable parameters that `fully_shard` manages in a unit, by name in the model, in buffer order.
    modules: the name of each module.

    That order is by module, children before their parent (`named_parameters` has the parent first), without nested
    units and their parameters, and without ignored parameters, which are not DTensors. A parameter that modules share
    has the place of its first module.
    """
    names: dict[DTensor, str] = {}
    seen: set[nn.Module] = set()
    for first in modules_of(unit):
        for name, module in _children_first(first, modules[first], seen):
            for key, parameter in module.named_parameters(name, recurse=False):
                if isinstance(parameter, DTensor) and parameter.requires_grad:
                    names.setdefault(parameter, key)
    return {name: parameter for parameter, name in names.items()}


def _children_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    for child_name, child in module.named_children():
        if child not in seen and not isinstance(child, FSDPModule):
            yield from _children_first(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module
