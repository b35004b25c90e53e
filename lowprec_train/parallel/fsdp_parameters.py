"""What FSDP2 has no public name for, in the one place that asks for it: which tensor it looks at for the functions that
gather a parameter, the buffers that it made at the first gather (decision 0020), and where it adds up whole gradients
(decision 0079).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.optim.accumulation import GradientSum


def looked_at(parameter: DTensor) -> Tensor:
    """The very tensor whose attributes `fsdp_pre_all_gather` and `fsdp_post_all_gather` FSDP2 takes; `to_local` may
    return a view of it.
    """
    part: Tensor = parameter._local_tensor
    return part


def forget_buffers(unit: FSDPModule, module: nn.Module) -> None:
    """Let the next gather of the parameters of `module`, a part of `unit`, choose dtypes and sizes anew. The unit is
    resharded and no gradient is waiting.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params:
        if parameter._module_info.module is module:
            parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
            parameter.__dict__.pop("_unsharded_param", None)


def hold_sums(unit: FSDPModule, sum_of: Callable[[Tensor], GradientSum], number: Callable[[], int]) -> None:
    """Let `sum_of` a sharded parameter hold what FSDP2 adds up in FP32 over backward passes that reduce nothing.

    number: of the micro-batch. The first pass that reduces takes the sum, with its own gradient, in FP32.
    """
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        held = sum_of(parameter.sharded_param)
        parameter.accumulate_unsharded_grad_if_needed = partial(_join, parameter, held, group)
        parameter.to_accumulated_grad_if_needed = partial(_put, parameter, held, number)


def _join(parameter: Any, held: GradientSum, group: Any) -> None:
    """Where a backward pass is about to reduce."""
    if group.reduce_grads and not held.empty:
        whole = parameter._unsharded_param
        gradient, whole.grad = whole.grad, None
        parameter.unsharded_accumulated_grad = held.take(gradient)


def _put(parameter: Any, held: GradientSum, number: Callable[[], int]) -> None:
    """Where it has reduced nothing."""
    whole = parameter._unsharded_param
    gradient, whole.grad = whole.grad, None
    if gradient is not None:
        held.add(gradient, number())
