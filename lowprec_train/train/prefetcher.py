"""The batches of a step, loaded one step ahead.

A batch is a pure function of (seed, step, index). Prefetching loads step + 1 in a thread, and there is no loader state
to save.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowprec_train.data.loader import Batch, Dataset
from lowprec_train.model.loss import IGNORED


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One process's micro-batches of a step, on the host, and the number of their targets (0-dim FP32)."""

    micro: tuple[Batch, ...]
    targets: Tensor


def load_step(
    dataset: Dataset, step: int, *, per_step: int, micro_batch: int, pinned: bool, index: int = 0, count: int = 1
) -> StepBatch:
    """Load one process's share of the `per_step` sequences of a step, as micro-batches of `micro_batch` sequences.

    index, count: process `index` of `count` gets the micro-batches i * count + index, for i = 0, 1, ... Every process
    gets the same number: a missing micro-batch is replaced by the step's first sequences without targets.
    """
    micro = []
    for turn in range(0, per_step, count * micro_batch):
        first = turn + index * micro_batch
        batch = dataset.batch(step, first if first < per_step else 0, micro_batch, per_step)
        targets = batch.targets if first < per_step else torch.full_like(batch.targets, IGNORED)
        batch = replace(batch, first=first, targets=targets)
        micro.append(batch.moved(Tensor.pin_memory) if pinned else batch)
    target_count = sum(int((batch.targets != IGNORED).sum()) for batch in micro)
    return StepBatch(micro=tuple(micro), targets=torch.tensor(float(target_count)))


class Prefetcher:
    """Returns the batches of steps 0 .. steps - 1 and loads one step ahead. load: returns the batch of a step."""

    def __init__(self, load: Callable[[int], StepBatch], *, steps: int) -> None:
        self._load, self._steps = load, steps
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def take(self, step: int) -> StepBatch:
        """Return the batch of `step` and start to load `step + 1`."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._load, step))
        batch = self._ahead[1].result()
        self._ahead = (step + 1, self._thread.submit(self._load, step + 1)) if step + 1 < self._steps else None
        return batch
