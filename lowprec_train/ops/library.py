"""Registers the ops: schema, fake kernel, and the reference as the kernel of every device that has none of its own.

On CUDA the reference runs through torch.compile behind the same schema (eager Philox is 10 to 25 times slower); the
bits are those of the eager reference. `live_kernels` says what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops import reference
from lowprec_train.ops.schema import FAKES, SCHEMAS

_LIBRARY = torch.library.Library("lowprec", "DEF")
EAGER_ON_CUDA = {"outlier_bounds"}  # selection is a library call either way


@cache
def _compiled(name: str, variant: tuple) -> Callable:
    """One code object per variant: torch counts recompilations per code object and gives up after a few."""
    function = getattr(reference, name)
    return torch.compile(
        FunctionType(function.__code__.replace(co_name=f"{name}_{hash(variant) & 0xFFFF:x}"), function.__globals__),
        fullgraph=True,
    )


def _on_cuda(name: str, *args: Any) -> Any:
    variant = tuple(
        (a.dtype, a.is_contiguous()) if isinstance(a, Tensor) else tuple(a) if isinstance(a, list) else a for a in args
    )
    return _compiled(name, variant)(*args)


def _register(name: str, schema: str) -> None:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    if name not in EAGER_ON_CUDA:
        _LIBRARY.impl(name, partial(_on_cuda, name), "CUDA")
    torch.library.register_fake(f"lowprec::{name}", FAKES[name])


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema)


def live_kernels(device: torch.device) -> dict[str, str]:
    """Which kernel runs for each op on a device."""
    compiled = device.type == "cuda"
    return {name: "reference, compiled" if compiled and name not in EAGER_ON_CUDA else "reference" for name in SCHEMAS}
