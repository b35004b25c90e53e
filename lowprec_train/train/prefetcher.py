"""The batches of a step, loaded one step ahead.

A batch is a pure function of (seed, step, index), so loading ahead is asking for step + 1 in a thread, and there is
no loader state to save.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100


class Batch(Protocol):
    """Tokens and targets, int64 [count, seq], -100 where nothing is to be predicted; document ids or None."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor | None: ...


class Dataset(Protocol):
    """Sequences first .. first + count of the `per_step` sequences of global step `step`."""

    def batch(self, step: int, first: int, count: int, per_step: int) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What `model.loss` takes, and the index of its first sequence within the step."""

    first: int
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None

    def to(self, device: torch.device) -> MicroBatch:
        """On `device`; from pinned memory the copy waits for nothing."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        tokens, targets = (part.to(device, non_blocking=True) for part in (self.tokens, self.targets))
        return MicroBatch(first=self.first, tokens=tokens, targets=targets, documents=documents)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One process's micro-batches of a global step, on the host; the number of their targets, 0-dim FP32."""

    micro: tuple[MicroBatch, ...]
    targets: Tensor


@dataclass(frozen=True)
class Share:
    """Which micro-batches of a step are one process's: number i * count + index, for i = 0, 1, ..."""

    index: int = 0
    count: int = 1


ALL = Share()


def load_step(
    dataset: Dataset, *, step: int, per_step: int, micro_batch: int, pinned: bool, share: Share = ALL
) -> StepBatch:
    """This process's share of the `per_step` sequences of step `step`, as micro-batches of `micro_batch` sequences.

    Every process gets equally many: where they run out, one repeats the step's first sequences without targets.
    """
    micro = []
    for turn in range(0, per_step, share.count * micro_batch):
        first = turn + share.index * micro_batch
        batch = dataset.batch(step, first if first < per_step else 0, micro_batch, per_step)
        targets = batch.targets if first < per_step else torch.full_like(batch.targets, IGNORED)
        parts = (batch.tokens, targets, batch.documents)
        tokens, targets, documents = (_pin(part) if pinned else part for part in parts)  # type: ignore[assignment]
        assert tokens is not None and targets is not None
        micro.append(MicroBatch(first=first, tokens=tokens, targets=targets, documents=documents))
    count = sum(int((batch.targets != IGNORED).sum()) for batch in micro)
    return StepBatch(micro=tuple(micro), targets=torch.tensor(float(count)))


def _pin(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.pin_memory()


class Prefetcher:
    """Hands out the batches of steps 0 .. steps - 1, the next one always loading."""

    def __init__(
        self, dataset: Dataset, *, steps: int, per_step: int, micro_batch: int, pinned: bool, share: Share = ALL
    ) -> None:
        self._dataset, self._steps, self._share = dataset, steps, share
        self._per_step, self._micro_batch, self._pinned = per_step, micro_batch, pinned
        self._thread = ThreadPoolExecutor(1, "feed")
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def take(self, step: int) -> StepBatch:
        """The batch of `step`; loading `step + 1` begins."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._load, step))
        batch = self._ahead[1].result()
        self._ahead = (step + 1, self._thread.submit(self._load, step + 1)) if step + 1 < self._steps else None
        return batch

    def _load(self, step: int) -> StepBatch:
        return load_step(
            self._dataset,
            step=step,
            per_step=self._per_step,
            micro_batch=self._micro_batch,
            pinned=self._pinned,
            share=self._share,
        )
