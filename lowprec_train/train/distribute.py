"""Distribute a model over the processes of a run: mesh, layers, optimizer and gradient reduction.

    1. on the meta device   tensor parallelism, then `fully_shard`: each process allocates its shards only
    2. initialisation       every shard is cut from the same initial values, so all layouts start with equal weights
    3. after allocation     process groups for the optimizer, the gradient reduction and the trainer

With one process all three steps are skipped, and model, optimizer and trainer stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.comm import fsdp
from lowprec_train.comm.fsdp_units import fsdp_units
from lowprec_train.comm.process_group import DistributedGroup, GroupProduct
from lowprec_train.config import ParallelConfig
from lowprec_train.group import Group
from lowprec_train.model.transformer import Transformer, fill_whole
from lowprec_train.optim.accumulation import GradientSum
from lowprec_train.optim.shard import Shard
from lowprec_train.parallel import data, tensor
from lowprec_train.parallel.data import DataParallelContext, SingleProcess
from lowprec_train.parallel.fsdp_parameters import store_in_param_dtype
from lowprec_train.parallel.mesh import Mesh, Sizes
from lowprec_train.parallel.placement import Placed, Placements
from lowprec_train.parallel.quantized_all_gather import QuantizedAllGather
from lowprec_train.parallel.weight_amax import WeightAmax
from lowprec_train.precision.schedule import Phase


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a model is distributed. mesh and placements: None with one process."""

    sizes: Sizes = field(default_factory=Sizes)
    mesh: Mesh | None = None
    placements: Placements | None = None

    def fill(self, name: str, parameter: Tensor, first_value: Callable[[torch.Size], Tensor]) -> None:
        """Set this process's shard of a parameter from the initial value of the whole parameter."""
        if self.placements is None:
            fill_whole(name, parameter, first_value)
            return
        whole = first_value(torch.Size(self.placements.parameters[name].shape))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(self.placements.local(name, whole))

    def shards(self, model: nn.Module) -> dict[nn.Parameter, Shard] | None:
        """Return the shards of the parameters, for the optimizer; None if every parameter is whole."""
        if self.mesh is None or self.placements is None:
            return None
        return {
            parameter: self.placements.shard(name, self._group(self.placements.parameters[name]))
            for name, parameter in model.named_parameters()
        }

    def data_parallel(
        self,
        model: Transformer,
        parallel: ParallelConfig,
        *,
        reduction: fsdp.Reduction,
        micro_batches: int,
        measured: bool = True,
        whole_sum: Callable[[int], GradientSum] | None = None,
    ) -> DataParallelContext:
        """Return the communication of a training step. From now on weights are all-gathered and gradients reduced as
        `parallel` and `reduction` say. Shards are stored in the dtype to which `fully_shard` rounds them; call it after
        the optimizer has rounded them. micro_batches: of a step on each rank. measured: as in `comm.fsdp.attach`.
        whole_sum: as in `parallel.data.DataParallel`.
        """
        if self.mesh is None:
            return SingleProcess(reduction=fsdp.attach(model, reduction=reduction, shard_group=None))
        for unit in fsdp_units(model):
            store_in_param_dtype(unit)
        replicas = self.mesh.nodes("dp_replicate") if self.sizes.dp_replicate > 1 else None
        reducer = fsdp.attach(
            model,
            reduction=reduction,
            shard_group=self.mesh.nodes("dp_shard"),
            replica_group=replicas,
            measured=measured,
            symmetric_memory=parallel.symmetric_memory,
        )
        partial = tensor.summed_over_tp(model) if self.sizes.tp > 1 else ()
        all_gather, parts = None, self.mesh.group("tp") if self.sizes.tp > 1 else None
        if self.sizes.dp > 1:
            all_gather = QuantizedAllGather.of(
                model,
                param_all_gather=parallel.param_all_gather,
                dtype=model.dtype,
                shards=self.mesh.group("dp_shard"),
                parts=parts,
                grad_dtype=data.grad_dtype(
                    reduction.codec, grad_reduce=parallel.grad_reduce, micro_batches=micro_batches
                ),
            )
        weight_amax = None
        if self.sizes.tp > 1:
            axes = ("tp", "dp_shard") if self.sizes.dp_shard > 1 else ("tp",)
            groups = [DistributedGroup.of(self.mesh.group(axis)) for axis in axes]
            weight_amax = WeightAmax(model, dtype=model.dtype, groups=groups, all_gather=all_gather)
        return data.DataParallel(
            model,
            self.mesh,
            reducer,
            grad_reduce=parallel.grad_reduce,
            partial=partial,
            all_gather=all_gather,
            weight_amax=weight_amax,
            whole_sum=whole_sum,
        )

    @property
    def tp_group(self) -> Group | None:
        """The ranks with the other parts of a layer; None without tensor parallelism."""
        return None if self.mesh is None or self.sizes.tp == 1 else DistributedGroup.of(self.mesh.group("tp"))

    @property
    def first_data(self) -> bool:
        """Whether this rank has the first micro-batch of every step."""
        return self.mesh is None or self.mesh.dp_rank == 0

    def _group(self, placed: Placed) -> Group | None:
        assert self.mesh is not None
        groups = [("tp", placed.tp is not None and self.sizes.tp > 1)]
        groups += [("dp_shard", placed.sharded and self.sizes.dp_shard > 1)]
        cut = [DistributedGroup.of(self.mesh.group(axis)) for axis, cuts in groups if cuts]
        return GroupProduct(*cut) if len(cut) > 1 else cut[0] if cut else None


def distribute(
    model: Transformer,
    sizes: Sizes,
    device: torch.device,
    *,
    phases: Sequence[Phase],
    tokens: int,
    reshard: bool,
    blocks_per_unit: int = 1,
    values: torch.dtype = torch.float32,
    timeout: timedelta | None = None,
    node_size: int | None = None,
) -> Distribution:
    """Distribute `model`, still on the meta device, over the processes.

    phases: of the run, with the recipe of every linear. tokens: per micro-batch. blocks_per_unit, values: as in
    `parallel.data.shard`. timeout: of every collective. node_size: as in `parallel.mesh.Mesh`.
    Raises ValueError, with the numbers, if the sizes of the model do not divide by those of the layout.
    """
    if sizes.processes == 1:
        return Distribution()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    mesh, cuts = Mesh(sizes, device.type, timeout, node_size), {}
    if sizes.tp > 1:
        tables, saved = [phase.recipes for phase in phases], [phase.saved_activations for phase in phases]
        tensor.check(model, sizes.tp, tokens=tokens, recipes=tables, saved_activations=saved)
        cuts = tensor.apply(model, DistributedGroup.of(mesh.group("tp")))
    if sizes.dp > 1:
        staying = data.units([model.head])
        data.shard(
            model,
            list(model.blocks),
            staying,
            mesh,
            reshard=reshard,
            forward_only=[model.embedding] if staying else [],  # a tied head has no matrix, and needs the embedding's
            blocks_per_unit=blocks_per_unit,
            values=values,
        )
    placed = {
        name: Placed(shape=shape, tp=cuts.get(name), sharded=sizes.dp > 1 and len(shape) >= 2)
        for name, shape in shapes.items()
    }
    return Distribution(sizes=sizes, mesh=mesh, placements=Placements(mesh, placed))
