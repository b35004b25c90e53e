"""What FSDP2 has no public name for, in the one place that asks for it: which tensor it looks at for the functions that
gather a parameter, and the buffers that it made at the first gather (decision 0020).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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
