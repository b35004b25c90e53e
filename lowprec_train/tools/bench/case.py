"""One row of `lowprec bench kernels`, and the problems that rows are measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Tensor | None, ...]
SHAPES = {  # LLaMA 7B, 16,384 tokens
    "hidden": (16384, 4096),
    "ffn": (16384, 11008),
    "gate_up": (16384, 22016),
    "weight": (22016, 4096),
}
ACTIVATIONS = ("hidden", "ffn", "gate_up")
WEIGHTS = ("weight",)


def values(dtype: torch.dtype = torch.bfloat16) -> Callable[[int, int, torch.device], Inputs]:
    """Return a function that makes one matrix of normal values."""
    return lambda m, k, device: (torch.randn(m, k, device=device, dtype=dtype),)


@dataclass(frozen=True, kw_only=True)
class Case:
    """op: name in the schema. inputs: makes the tensors of an [m, k] problem on a device. call: runs the op on them."""

    name: str
    op: str
    inputs: Callable[[int, int, torch.device], Inputs]
    call: Callable[..., Any]
    passes: int = 1
    shapes: tuple[str, ...] = ACTIVATIONS

    def moved(self, rows: int, columns: int) -> int:
        """Return the bytes that must move."""
        inputs = self.inputs(rows, columns, torch.device("meta"))
        outputs = self.call(*inputs)
        outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
        return self.passes * size(inputs[:1]) + size(inputs[1:]) + size(outputs)


def size(tensors: Any) -> int:
    """Return the bytes of the tensors that are not None."""
    return sum(each.nbytes for each in tensors if each is not None)
