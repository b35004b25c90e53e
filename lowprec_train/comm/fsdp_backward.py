"""The reduction of a unit's gradients in FSDP2's backward pass, on the gradients themselves (decision 0102).

    FSDP2   gradients -> copied to one FP32 buffer -> reduce-scatter -> views of the sum as .grad of the shards
    here    gradients                              -> reduce-scatter -> views of the sum as .grad of the shards

No public hook of torch 2.11 to 2.13 passes the gradients: a custom reduce-scatter gets the buffer. This module has the
private names of a unit's parameter group that it takes to do the second line, with FSDP2's own streams and order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class UnitReduction(Protocol):
    """The sum of one unit's gradients over ranks.

    reduce_scatter: the whole gradients of the unit's parameters, in their order -> FP32 [size], this rank's shards one
    after the other, each of them padded to the size of the first rank's. all_reduce: sums such a tensor over the ranks
    with the same shards, in place; None if there are no others.
    """

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor: ...

    @property
    def all_reduce(self) -> Callable[[Tensor], None] | None: ...


class InFlight:
    """The gradients that the last reduction of a model reads. They are freed at the next reduction and at the end of a
    step, once it is through with them: the memory belongs to the stream of the backward pass, which the reduction's
    stream runs beside.
    """

    def __init__(self) -> None:
        self._held: tuple[Sequence[Tensor], Any] | None = None

    def hold(self, gradients: Sequence[Tensor], event: Any) -> None:
        self._held = (gradients, event)

    def release(self) -> None:
        """Make the current stream wait for the last reduction, and free its gradients."""
        if self._held is not None and isinstance(self._held[1], torch.cuda.Event):
            torch.cuda.current_stream().wait_event(self._held[1])
        self._held = None


def reduce_with(unit: FSDPModule, reduction: UnitReduction, in_flight: InFlight) -> None:
    """Reduce the gradients of `unit` with `reduction` at the end of its backward pass. in_flight: one for all units of
    a model.

    The backward pass raises ValueError if some of the unit's parameters have a gradient and others have none.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    post_backward = group.post_backward

    def pop_and_reduce(*unused: Any) -> None:
        gradients = _pop_gradients(group) if group.reduce_grads else []
        post_backward(*unused)
        if gradients:
            _reduce(group, gradients, reduction, in_flight)

    group.post_backward = pop_and_reduce


def _trained(group: Any) -> list[Any]:
    return [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]


def _pop_gradients(group: Any) -> list[Tensor]:
    """Remove and return the gradients of a backward pass, added to those of earlier ones without reduction."""
    gradients: list[Tensor] = []
    missing: list[str] = []
    for parameter in _trained(group):
        if not hasattr(parameter, "_unsharded_param"):
            return []  # not used in a forward pass yet
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is not None:
            gradients.append(parameter.unsharded_accumulated_grad_data)
        elif parameter.unsharded_param.grad is not None:
            gradients.append(parameter.unsharded_grad_data)
        else:
            missing.append(parameter._param_fqn or parameter._module_info.param_name)
    if gradients and missing:
        raise ValueError(f"every parameter of a unit needs a gradient to be reduced; without one: {', '.join(missing)}")
    for parameter in _trained(group):
        parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
    return gradients


@torch.no_grad()
def _reduce(group: Any, gradients: list[Tensor], reduction: UnitReduction, in_flight: InFlight) -> None:
    device, streams = group.device_handle, group.comm_ctx
    current, stream = device.current_stream(), streams.reduce_scatter_stream
    group._wait_for_post_backward()
    in_flight.release()
    stream.wait_stream(current)
    with device.stream(stream):
        total = reduction.reduce_scatter(gradients)
        in_flight.hold(gradients, stream.record_event())
    repeated = total.is_cuda and torch.cuda.is_current_stream_capturing()
    if reduction.all_reduce is not None:
        stream = streams.all_reduce_stream
        stream.wait_stream(streams.reduce_scatter_stream)
        if total.is_cuda and not repeated:  # a cast frees it, but only its own stream would wait for this one
            total.record_stream(stream)
    with device.stream(stream):
        if reduction.all_reduce is not None:
            reduction.all_reduce(total)
        _set_shard_gradients(_trained(group), total)
        group._post_reduce_event = stream.record_event()
    if repeated and stream is not streams.reduce_scatter_stream:
        streams.reduce_scatter_stream.wait_stream(stream)  # a CUDA graph keeps what another stream has recorded
    if hasattr(streams, "_last_post_reduce_events"):  # torch 2.13 waits for these at the end of a backward pass
        streams._last_post_reduce_events[stream] = group._post_reduce_event


def _spec(parameter: Any, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a shard, with the dtype of its gradient."""
    spec: DTensorSpec = parameter._sharding_spec
    assert spec.tensor_meta is not None
    if spec.tensor_meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def _set_shard_gradients(parameters: Sequence[Any], total: Tensor) -> None:
    """Set or add to the gradients of the shards, in their `grad_dtype`, and call their hooks."""
    total, at = total.to(parameters[0].sharded_param.grad_dtype), 0
    for parameter in parameters:
        size = parameter.sharded_size
        gradient = total[at : at + size.numel()].view(size)
        at += parameter.padded_sharded_param_size.numel()
        shard = parameter.sharded_param
        if shard.grad is None:
            shard.grad = _from_local_no_grad(gradient, _spec(parameter, gradient.dtype))
        else:
            shard.grad._local_tensor += gradient
        for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(shard)
