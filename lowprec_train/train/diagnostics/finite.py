"""Check that tensors are finite, before they are saved and after they are read.

A step whose gradients are not finite is skipped (`train.diagnostics.divergence`), so parameters and optimizer states
stay finite unless an update overflows. NaN in an embedding row that no token uses does not change the loss. This check
finds it before it is saved or exported, in one pass and without a copy of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec_train.train.launch import every

Found = dict[str, tuple[int, int]]
"""Name of a tensor -> (number of NaN or infinite elements, number of all elements)."""

NAMED = 3  # maximum number of tensors in a message
SLICE = 1 << 24  # elements per count
NOT_FINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}  # smallest such code, without the sign


def found(tensors: Mapping[str, Any]) -> Found:
    """Return the non-finite tensors. Only float tensors are checked. The host waits for the device once."""
    floats = {name: _local(each) for name, each in tensors.items() if isinstance(each, Tensor)}
    floats = {name: each for name, each in floats.items() if each.is_floating_point() and each.numel()}
    if not floats:
        return {}
    finite = [_all_finite(each) for each in floats.values()]
    devices = {flag.device for flag in finite}
    flags = torch.cat([torch.stack([flag for flag in finite if flag.device == on]).cpu() for on in devices])
    if bool(flags.all()):
        return {}
    return {name: (bad, each.numel()) for name, each in floats.items() if (bad := count(each))}


def found_anywhere(tensors: Mapping[str, Any], group: dist.ProcessGroup | None) -> Found:
    """Return `found`, summed over the processes of a group. All of them call it, with tensors of the same names."""
    of_ranks = every(lambda: found(tensors), group)
    names = sorted({name for each in of_ranks for name in each})
    pairs = {name: [each[name] for each in of_ranks if name in each] for name in names}
    return {name: (sum(bad for bad, _ in those), sum(size for _, size in those)) for name, those in pairs.items()}


def summary(bad: Found) -> str:
    """Return text for messages: `head.weight (3 of 4,096 elements), ... and 2 more tensors`."""
    listed = [f"{name} ({count:,} of {size:,} elements)" for name, (count, size) in list(bad.items())[:NAMED]]
    more = f" and {len(bad) - NAMED} more tensors" if len(bad) > NAMED else ""
    return ", ".join(listed) + more


def check(name: str, tensor: Tensor, source: object) -> Tensor:
    """Return the tensor. Raises ValueError with its name, its source and the number of NaN or infinite elements."""
    bad = found({name: tensor})
    if bad:
        raise ValueError(f"{source} holds NaN or infinity: {summary(bad)}")
    return tensor


def count(x: Tensor) -> int:
    """Return the number of elements that are NaN or infinite."""
    parts = x.detach().flatten().split(SLICE)
    if x.dtype in NOT_FINITE:
        return sum(int(((part.view(torch.uint8) & 0x7F) >= NOT_FINITE[x.dtype]).sum()) for part in parts)
    return sum(int((~part.isfinite()).sum()) for part in parts)


def _all_finite(x: Tensor) -> Tensor:
    """Return whether all elements are finite, 0-dim bool; aminmax propagates NaN."""
    if x.dtype in NOT_FINITE:
        return (x.detach().view(torch.uint8) & 0x7F).amax() < NOT_FINITE[x.dtype]
    low, high = torch.aminmax(x.detach())
    return low.isfinite() & high.isfinite()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
