"""FSDP2's private names, but for its units and backward pass (comm/fsdp_units.py, comm/fsdp_backward.py): the tensor
with the extension functions of an all-gather, the buffers of the first all-gather (decision 0020), the moment when a
unit is freed (decision 0102), and the accumulation of whole gradients (decision 0079) or their removal.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.comm.fsdp_units import modules_of
from lowprec_train.optim.accumulation import GradientSum


def with_extensions(parameter: DTensor, before: Callable[..., Any], after: Callable[..., Any]) -> Tensor:
    """Let FSDP2 call the bound methods `before` and `after` around the all-gather of a parameter, and return its local
    tensor. Their object is held weakly: views of the local tensor hide it from Python's garbage collector.
    """
    found: Any = parameter._local_tensor  # where FSDP2 looks them up; `to_local` may return a view of it
    pre_all_gather = _weakly(before)
    pre_all_gather.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]  # FSDP2 asks at every call
    found.fsdp_pre_all_gather, found.fsdp_post_all_gather = pre_all_gather, _weakly(after)
    return cast(Tensor, found)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any, **options: Any) -> Any:
        found = weak()
        assert found is not None, "the owner of an all-gather's extension functions is gone"
        return found(*arguments, **options)

    return call


def reset_buffers(unit: FSDPModule, module: nn.Module) -> None:
    """Make the next all-gather of the parameters of `module`, a part of `unit`, choose dtypes and sizes again. The unit
    must be resharded, without pending gradients.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params:
        if parameter._module_info.module is module:
            parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
            parameter.__dict__.pop("_unsharded_param", None)


def store_in_param_dtype(unit: FSDPModule) -> None:
    """Store the shards of `unit` in the dtype of its MixedPrecisionPolicy, if it has one; gradients stay in FP32. The
    parameters stay the same objects, but their local tensors are replaced. Call it before the first forward pass.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    dtype = None if group is None else group.mp_policy.param_dtype
    if dtype is None:
        return
    for module in modules_of(unit):
        module._apply(lambda x: x.to(dtype) if isinstance(x, DTensor) else x)
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad_dtype = torch.float32


def gathered_parameters(unit: FSDPModule) -> list[Tensor]:
    """Return the parameters that FSDP2 gathers with `unit`, frozen ones too, in the order of its buffer."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else [parameter.sharded_param for parameter in group.fsdp_params]


def stays_gathered(unit: FSDPModule) -> bool:
    """Return whether a forward pass leaves the parameters of `unit` gathered, for the backward pass or the next one."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    return not group._reshard_after_forward


def communication_streams(root: FSDPModule) -> list[torch.cuda.Stream]:
    """Return the streams of the collectives of a model on GPUs, after its first forward pass."""
    context: Any = root._get_fsdp_state()._comm_ctx
    names = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    return [getattr(context, name) for name in names]


def forget_events(root: FSDPModule) -> None:
    """Let the next all-gather wait for no earlier one. Call it between steps, when the device has finished."""
    context: Any = root._get_fsdp_state()._comm_ctx
    context.all_gather_state = None


def on_reshard(unit: FSDPModule, call: Callable[[], None]) -> None:
    """Call `call` when the gathered parameters of `unit` are freed, after the kernels that read them are launched."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    to_sharded = group._to_sharded

    def free_and_call() -> None:
        gathered = not group.is_sharded
        to_sharded()
        if gathered:
            call()

    group._to_sharded = free_and_call


def cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in `dtype`, in one launch; those that have it as they are."""
    made = {place: torch.empty_like(x, dtype=dtype) for place, x in enumerate(tensors) if x.dtype != dtype}
    if made:
        copy_all(list(made.values()), [tensors[place] for place in made])
    return [made.get(place, x) for place, x in enumerate(tensors)]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one launch."""
    torch._foreach_copy_(list(targets), list(sources))


def accumulate_in(
    unit: FSDPModule, sum_of: Callable[[Tensor], GradientSum], number: Callable[[], Tensor | None]
) -> None:
    """Accumulate gradients of backward passes without reduction in `sum_of(parameter)`, not in FSDP2's FP32 sum.

    number: as in `GradientSum.add`, of the micro-batch. The first pass that reduces gets the sum, with its own
    gradient, in FP32.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        accumulated = sum_of(parameter.sharded_param)
        parameter.accumulate_unsharded_grad_if_needed = partial(_take_sum, parameter, accumulated, group)
        parameter.to_accumulated_grad_if_needed = partial(_add_to_sum, parameter, accumulated, number)


@contextmanager
def without_gradients(unit: FSDPModule) -> Iterator[None]:
    """Drop the gradients of backward passes without reduction, at the end of the unit's backward pass."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    parameters = [] if group is None else group.fsdp_params
    replaced = [(p, p.__dict__.get("to_accumulated_grad_if_needed")) for p in parameters]
    for parameter in parameters:
        parameter.to_accumulated_grad_if_needed = partial(_drop, parameter)
    try:
        yield
    finally:
        for parameter, before in replaced:
            del parameter.to_accumulated_grad_if_needed  # that of the class is visible again
            if before is not None:
                parameter.to_accumulated_grad_if_needed = before


def _drop(parameter: Any) -> None:
    parameter._unsharded_param.grad = None


def _take_sum(parameter: Any, accumulated: GradientSum, group: Any) -> None:
    """Give FSDP2 the sum, if the backward pass is about to reduce."""
    if group.reduce_grads and not accumulated.empty:
        whole = parameter._unsharded_param
        gradient, whole.grad = whole.grad, None
        parameter.unsharded_accumulated_grad = accumulated.take(gradient)


def _add_to_sum(parameter: Any, accumulated: GradientSum, number: Callable[[], Tensor | None]) -> None:
    """Add the gradient of a backward pass that has reduced nothing."""
    whole = parameter._unsharded_param
    gradient, whole.grad = whole.grad, None
    if gradient is not None:
        accumulated.add(gradient, number())
