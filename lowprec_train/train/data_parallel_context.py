"""The processes that share a training step, as the trainer sees them: who sees which data, and what is summed.

The trainer calls the same methods in every layout, on all processes in the same order. `SingleProcess` implements them
for one process without a copy, a collective or a rounding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from lowprec_train.parallel.data import DataParallel


class SingleProcess:
    """One process: the methods of `DataParallel`, which has their meaning.

    parts: what of the communication checkpoints of any layout hold.
    """

    index, count = 0, 1

    def __init__(self, **parts: Stateful) -> None:
        self._parts = parts

    def prepare(self) -> None: ...

    def begin_backward(self, number: int, *, last: bool) -> None: ...

    def complete_in_backward(self, parameter: nn.Parameter) -> bool:
        return True

    def end_backward(self) -> None: ...

    def metrics(self) -> dict[str, Tensor | float]:
        return {}

    def all_gather_formats(self) -> dict[str, str]:
        return {}

    def state_parts(self) -> dict[str, Stateful]:
        return self._parts

    def total(self, value: Tensor) -> Tensor:
        return value


DataParallelContext = SingleProcess | DataParallel
