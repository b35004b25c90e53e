"""Data parallelism: `fully_shard` around each block, and the communication of a training step.

    matrices   row shards on every dp_shard rank; all-gathered before a block computes; `comm.fsdp` reduces their
               gradients after its backward pass
    vectors    whole on every rank; their gradients are summed once per step, in FP32 and in rank order

Two settings choose the stage of ZeRO. With `reshard_after_forward` a block's weights are gathered again for its
backward pass (ZeRO-3) instead of staying (ZeRO-2). With grad_reduce="every_microbatch" every micro-batch's gradients
are reduced at once, and only this rank's shard is stored. With grad_reduce="last_microbatch" whole gradients are
accumulated and reduced at the last micro-batch (the traffic of ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.collectives import all_reduce
from lowprec_train.comm.fsdp import Reducer
from lowprec_train.comm.fsdp_units import fsdp_units
from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.comm.nodes import Links
from lowprec_train.comm.process_group import ALL_GATHER
from lowprec_train.group import sum_in_order
from lowprec_train.numerics.formats import FP32
from lowprec_train.optim.accumulation import GradientSum
from lowprec_train.parallel.fsdp_parameters import (
    accumulate_in,
    communication_streams,
    copy_all,
    forget_events,
    gathered_parameters,
    without_gradients,
)
from lowprec_train.parallel.mesh import Mesh
from lowprec_train.parallel.quantized_all_gather import QuantizedAllGather
from lowprec_train.parallel.weight_amax import WeightAmax

GRAD_REDUCE = ("last_microbatch", "every_microbatch")


def grad_dtype(codec: GradCodec, *, grad_reduce: str, micro_batches: int) -> torch.dtype | None:
    """Return the dtype in which GEMMs write the gradients of all-gathered weights; None: that of the parameters.

    It is BF16 if each of these gradients is sent at once and in no more bits (`GradCodec.bf16_suffices`). Where BF16 is
    sent, the bytes are the same, rounded by the GEMM or by the codec. micro_batches: of a step on each rank. With
    several, gradients that are reduced after the last one are summed first.
    """
    at_once = micro_batches == 1 or grad_reduce == "every_microbatch"
    return torch.bfloat16 if at_once and codec.bf16_suffices else None


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    staying: Iterable[nn.Module],
    mesh: Mesh,
    *,
    reshard: bool,
    forward_only: Sequence[nn.Module] = (),
    blocks_per_unit: int = 1,
    values: torch.dtype = torch.float32,
) -> list[FSDPModule]:
    """Shard the matrices of `model` over dp_shard, on the meta device or allocated; return the units, the root last.

    Each unit's all-gather begins before the unit in front of it computes (explicit prefetch). FSDP2 would begin it when
    the host arrives at the unit: too late if the host is not ahead of the GPU.

    blocks: gathered and released unit by unit, `blocks_per_unit` of them in each but the last. staying: gathered one by
    one and kept until their backward pass. forward_only: whose backward passes need no weights (embeddings), gathered
    one by one and released. Other matrices (positions, tied embeddings) belong to the root and stay gathered during a
    pass. values: dtype to which matrices of `blocks` and `staying` are rounded. If it is not FP32 they are gathered in
    it, and the gradients of a micro-batch have it, as in one process whose parameters have that dtype.
    """
    vectors = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    rounded, exact = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for dtype in (None if values == torch.float32 else values, None)
    )
    starts = range(0, len(blocks), blocks_per_unit)
    units = [([module], True, exact) for module in forward_only]
    units += [(list(blocks[first : first + blocks_per_unit]), reshard, rounded) for first in starts]
    units += [([module], False, rounded) for module in staying]
    made: list[FSDPModule] = []
    for modules, again, policy in [*units, ([model], False, exact)]:
        fully_shard(
            modules,
            mesh=mesh.axis("dp_shard"),
            reshard_after_forward=again,
            mp_policy=policy,
            ignored_params=vectors,
        )
        assert isinstance(modules[0], FSDPModule)
        made.append(modules[0])
    for unit in made[: len(forward_only)]:
        unit.set_unshard_in_backward(False)
    for unit, following in pairwise([made[-1], *made[:-1]]):
        unit.set_modules_to_forward_prefetch([following])
    register_fsdp_forward_method(model, "loss")
    return made


class DataParallel:
    """Communication of the ranks of one training step. grad_reduce: one of `GRAD_REDUCE`, as above.

    model: after `shard`. reducer: of its matrices' gradients. partial: names of vectors whose gradient is a partial sum
    on every tp rank. all_gather: of its weights, if they are not gathered as stored. weight_amax: of weights that are
    divided over tp. whole_sum: returns, for the index of a parameter, what accumulates whole gradients between the
    micro-batches of a step; None: FP32 sums.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        reducer: Reducer,
        *,
        grad_reduce: str = "last_microbatch",
        partial: Collection[str] = (),
        all_gather: QuantizedAllGather | None = None,
        weight_amax: WeightAmax | None = None,
        whole_sum: Callable[[int], GradientSum] | None = None,
    ) -> None:
        self._model, self._mesh, self._reducer, self._grad_reduce = model, mesh, reducer, grad_reduce
        self._of_weights = [each for each in (all_gather, weight_amax) if each is not None]
        self._all_gather = all_gather
        self._number: Tensor | None = None
        vectors = {name: p for name, p in model.named_parameters() if p.ndim < 2}
        self._partial = [p for name, p in vectors.items() if name in partial]
        self._whole = [p for name, p in vectors.items() if name not in partial]
        if whole_sum is not None and isinstance(model, FSDPModule):
            places: dict[Tensor, int] = {parameter: place for place, parameter in enumerate(model.parameters())}
            for unit in fsdp_units(model):
                accumulate_in(unit, lambda parameter: whole_sum(places[parameter]), lambda: self._number)

    @property
    def index(self) -> int:
        """Index of this rank among the ranks that see different data."""
        return self._mesh.dp_rank

    @property
    def count(self) -> int:
        """Number of ranks that see different data."""
        return self._mesh.sizes.dp

    def prepare(self) -> None:
        """Prepare the weights. Call it before the first micro-batch of a step, and before an evaluation."""
        for each in self._of_weights:
            each.prepare()

    def begin_backward(self, number: Tensor | None, *, last: bool) -> None:
        """Call before each micro-batch of a step. number: of this rank's micro-batch in the run, int64 [1], if sums of
        gradients draw. last: of the step.
        """
        self._number = None if number is None else number * self.count + self.index
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last or self._grad_reduce == "every_microbatch")

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Passes inside this context reduce no gradients, and gradients of matrices are dropped as they are made. Enter
        it before the first micro-batch of a step, after `prepare`.
        """
        with ExitStack() as stack:
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(False)
            for unit in fsdp_units(self._model):
                stack.enter_context(without_gradients(unit))
            yield

    def complete_in_backward(self, parameter: nn.Parameter) -> bool:
        """Return whether the backward pass makes the complete sum of a gradient, or this rank's shard of it. Gradients
        of vectors are summed after it.
        """
        return parameter.ndim >= 2

    def reduced_together(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each unit, whose gradients are reduced at once."""
        return [cast("list[nn.Parameter]", gathered_parameters(unit)) for unit in fsdp_units(self._model)]

    @torch.no_grad()
    def end_backward(self) -> None:
        """Sum the gradients of vectors, after the last backward pass of a step."""
        for parameters, group in ((self._partial, dist.group.WORLD), (self._whole, self._mesh.dp_group)):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if gradients:
                flat = _in_rank_order(torch.cat([gradient.flatten() for gradient in gradients]), group)
                parts = flat.split([each.numel() for each in gradients])
                copy_all(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        for each in self._of_weights:
            each.finish()
        self._reducer.end_backward()

    def end_step(self) -> None:
        """Finish the account of a step's reductions, after `end_backward`."""
        self._reducer.finish_step()

    def reshard(self) -> None:
        """Free the weights that an evaluation has left gathered, and what it has rounded."""
        for unit in fsdp_units(self._model):
            unit.reshard()
        for each in self._of_weights:
            each.free()

    @contextmanager
    def recorded(self) -> Iterator[Callable[[], None]]:
        """The passes of one step inside this context are recorded as a CUDA graph, on the current stream: they wait for
        nothing outside of it. Yield a function to call before `end_step` whenever the graph has run in their place.
        """
        streams = [] if not isinstance(self._model, FSDPModule) else communication_streams(self._model)
        self._forget_events()
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        before = self._reducer.sent
        sent: list[tuple[Links, Links]] = []
        try:
            yield lambda: self._reducer.restore(sent[0])
        finally:
            sent.append(self._reducer.sent)
            self._reducer.restore(before)
            for stream in streams:
                current.wait_stream(stream)
            self._forget_events()

    def _forget_events(self) -> None:
        if isinstance(self._model, FSDPModule):
            forget_events(self._model)
        if self._all_gather is not None:
            self._all_gather.memory.forget_events()

    def metrics(self) -> dict[str, Tensor | float]:
        """Return the metrics of the last step's gradient reductions; tensors are 0-dim, on the device."""
        return self._reducer.metrics()

    def all_gather_formats(self) -> dict[str, str]:
        """Return the format of each linear layer's weight under its current recipe; empty if gathered as stored."""
        return {} if self._all_gather is None else {n: str(form) for n, form in self._all_gather.formats().items()}

    def state_parts(self) -> dict[str, Stateful]:
        """Return the parts for a checkpoint, by name."""
        return {"reduction": self._reducer, "sampling": self._reducer.sampling}

    @torch.no_grad()
    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a value over the ranks that see different data, in rank order, with the same bits on each:
        in FP64 if it is FP64, otherwise in FP32.
        """
        add = _in_rank_order_fp64 if value.dtype == torch.float64 else _in_rank_order
        return add(value.flatten(), self._mesh.dp_group).view_as(value)

    def anywhere(self, flags: Tensor) -> Tensor:
        """Return which flags are set on any process, bool."""
        found = flags.to(torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found > 0


class SingleProcess:
    """The interface of `DataParallel` for one process, without a copy, a collective or a rounding.

    parts: the parts that checkpoints of any layout have.
    """

    index, count = 0, 1

    def __init__(self, **parts: Stateful) -> None:
        self._parts = parts

    def prepare(self) -> None: ...

    def begin_backward(self, number: Tensor | None, *, last: bool) -> None: ...

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        yield

    def complete_in_backward(self, parameter: nn.Parameter) -> bool:
        return True

    def reduced_together(self) -> list[list[nn.Parameter]]:
        return []

    def end_backward(self) -> None: ...

    def end_step(self) -> None: ...

    def reshard(self) -> None: ...

    @contextmanager
    def recorded(self) -> Iterator[Callable[[], None]]:
        yield lambda: None

    def metrics(self) -> dict[str, Tensor | float]:
        return {}

    def all_gather_formats(self) -> dict[str, str]:
        return {}

    def state_parts(self) -> dict[str, Stateful]:
        return self._parts

    def total(self, value: Tensor) -> Tensor:
        return value

    def anywhere(self, flags: Tensor) -> Tensor:
        return flags


DataParallelContext = SingleProcess | DataParallel
"""The processes that share a training step. The trainer calls the same methods in every layout, on all processes in the
same order.
"""


def _in_rank_order_fp64(flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return flat
    parts = flat.new_empty(group.size() * flat.numel())
    ALL_GATHER(parts, flat, group=group)
    return sum_in_order(parts.split(flat.numel()))


def _in_rank_order(flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return all_reduce(flat.float(), group, BlockScaledCodec(FP32), FlatLayout.plain(flat.numel())).total


def units(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of `modules` that have matrices: only these can be FSDP units."""
    return [module for module in modules if any(p.ndim >= 2 for p in module.parameters())]
