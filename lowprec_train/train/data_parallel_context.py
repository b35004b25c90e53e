"""The processes that share a training step, as the trainer sees them: who sees which data, and what is summed.

The trainer calls the same methods in every layout. `SingleProcess` implements them for one process without a copy, a
collective or a rounding, so that a run on one GPU is the same with and without this module.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful


class DataParallelContext(Protocol):
    """What a step needs of the other processes. All of them call every method, in the same order."""

    @property
    def index(self) -> int:
        """Place among the processes that see different data."""
        ...

    @property
    def count(self) -> int:
        """How many see different data. Micro-batch i of process d is number i * count + d of the step."""
        ...

    def prepare(self) -> None:
        """Before the first micro-batch of a step and before an evaluation, with the weights and recipes of both."""
        ...

    def begin_backward(self, *, last: bool) -> None:
        """Before each micro-batch. last: of the step, after which gradients are sums over all processes."""
        ...

    def end_backward(self) -> None:
        """After the last backward pass: sum the gradients that were not summed on the way."""
        ...

    def metrics(self) -> dict[str, Tensor | float]:
        """Of the step's communication; tensors are 0-dim, on the device."""
        ...

    def all_gather_formats(self) -> dict[str, str]:
        """Of each linear layer's weight, by the layer's name; empty where weights are gathered as stored."""
        ...

    def state_parts(self) -> dict[str, Stateful]:
        """What of the communication a checkpoint holds, by name."""
        ...

    def total(self, value: Tensor) -> Tensor:
        """The sum of a small FP32 tensor over the processes that see different data."""
        ...


class SingleProcess:
    """One process. parts: what of the communication checkpoints of any layout hold."""

    index, count = 0, 1

    def __init__(self, **parts: Stateful) -> None:
        self._parts = parts

    def prepare(self) -> None: ...

    def begin_backward(self, *, last: bool) -> None: ...

    def end_backward(self) -> None: ...

    def metrics(self) -> dict[str, Tensor | float]:
        return {}

    def all_gather_formats(self) -> dict[str, str]:
        return {}

    def state_parts(self) -> dict[str, Stateful]:
        return self._parts

    def total(self, value: Tensor) -> Tensor:
        return value
