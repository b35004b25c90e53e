"""The units of FSDP2: a unit is one module, or several that are gathered and reduced together."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return the first module of each unit of `model`, in the order of `model.modules()`: the root comes first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule) and modules_of(module)[0] is module]


def modules_of(unit: FSDPModule) -> tuple[nn.Module, ...]:
    """Return the modules of a unit, in the order in which they were given to `fully_shard`."""
    state: Any = unit._get_fsdp_state()
    return cast("tuple[nn.Module, ...]", state._modules)
