"""The forward and backward passes of a step, from tensors on the device to the gradients of all micro-batches.

Nothing in here reads a tensor's value or waits for the device, so `train.cuda_graph` can record the passes of one step
and repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from lowprec_train.numerics.draws import Draws
from lowprec_train.optim.accumulation import GradientSums
from lowprec_train.optim.in_backward import UpdatesInBackward
from lowprec_train.parallel.data import DataParallelContext
from lowprec_train.precision.schedule import PrecisionSchedule


class MicroBatch(NamedTuple):
    """A micro-batch on the device: tokens and targets, int64 [B, T]; documents, int64 [B, T] or None; its draws; its
    number in the run, int64 [1], if sums of gradients draw.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    draws: Draws | None
    number: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return all of its tensors."""
        others = [each for each in (self.documents, self.number) if each is not None]
        return [self.tokens, self.targets, *others, *(self.draws or ())]


class MicroBatchLoss:
    """The forward pass of a micro-batch under a precision schedule (None: the model keeps its recipes)."""

    def __init__(self, model: nn.Module, schedule: PrecisionSchedule | None) -> None:
        self._model, self._schedule = model, schedule
        self.of_model = cast("Callable[..., Tensor]", model.loss)

    def __call__(self, micro: MicroBatch, normalizer: Tensor) -> Tensor:
        """Return the sum of the token losses / normalizer, 0-dim FP32."""
        with nullcontext() if self._schedule is None else self._schedule.around_pass(self._model):
            return self.of_model(micro.tokens, micro.targets, normalizer, micro.documents, micro.draws)


class StepPasses(Protocol):
    """Runs the passes of a step. micro: of this rank. normalizer: 0-dim FP32, of all ranks. Returns the loss over all
    ranks, 0-dim FP32; gradients are in `.grad`.
    """

    def __call__(self, micro: Sequence[MicroBatch], normalizer: Tensor) -> Tensor: ...

    def close(self) -> None:
        """Free what it holds. Call it before the process group is destroyed."""


class Passes:
    """Runs the passes kernel by kernel.

    sums, in_backward: consumers of the gradients.
    """

    def __init__(
        self,
        loss: MicroBatchLoss,
        data_parallel: DataParallelContext,
        *,
        device: torch.device,
        sums: GradientSums | None = None,
        in_backward: UpdatesInBackward | None = None,
    ) -> None:
        self._loss, self._data_parallel, self._device = loss, data_parallel, device
        self._sums, self._in_backward = sums, in_backward

    def __call__(self, micro: Sequence[MicroBatch], normalizer: Tensor) -> Tensor:
        self._data_parallel.prepare()
        loss = torch.zeros((), device=self._device)
        for place, each in enumerate(micro, start=1):
            last = place == len(micro)
            self._data_parallel.begin_backward(each.number, last=last)
            loss_part = self._loss(each, normalizer)
            loss += loss_part.detach()
            if last:
                loss = self._data_parallel.total(loss)
            if self._sums is not None:
                self._sums.begin(each.number, last=last)
            if self._in_backward is not None:
                self._in_backward.begin(loss if last else None)
            loss_part.backward()
        self._data_parallel.end_backward()
        return loss

    def close(self) -> None:
        """Do nothing."""
