"""`lowprec bench memory`: memory of a training step by category, for recipes and peers one after another.

Memory is recorded at marks: after the forward pass of each block (of our models), at the loss, when each gradient is
accumulated, and after the update. At each mark, in bytes:

    parameters         with buffers
    optimizer states   allocated between steps, minus the parameters
    gradients          in `.grad`
    activations        other allocated memory: saved for the backward pass, or in use
    transient          peak since the previous mark, minus what is allocated now

`activations` of a row is that category at the loss, `peak` the maximum over the step. These are the columns of COAT's
table 7 (arXiv 2410.19313). The largest micro-batch follows from the line through the peaks of two micro-batch sizes.

On a GPU each contestant runs in a separate process, and numbers come from the allocator. On a CPU storages are counted.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowprec_train.tools.bench.contestant import Contestant, Entrant, Step, Work
from lowprec_train.tools.bench.fields import CATEGORIES
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.sharded import Arm
from lowprec_train.tools.bench.storages import Storages
from lowprec_train.tools.bench.timing import Interval
from lowprec_train.train.launch import ALONE

SHARE = 0.9  # of a GPU's memory
Row = dict[str, Any]
Mark = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run(Entrant):
    """A run of the trainer on one device."""

    arm: Arm

    def stepper(self, work: Work) -> Step:
        return self.train(work)[1]

    def train(self, work: Work, forward_done: Callable[[], None] = lambda: None) -> tuple[nn.Module, Step]:
        """Return the model and its step; the step calls `forward_done` after the forward pass."""
        trainer = self.arm.trainer(work, ALONE)
        trainer.model.head.register_forward_hook(lambda *_: forward_done())  # type: ignore[union-attr, operator]
        return trainer.model, self.arm.stepping(trainer)

    def facts(self, work: Work) -> Row:
        """Return the peak that `lowprec estimate` predicts."""
        return {"estimated": self.arm.estimate(work, 1)["memory"]["total"]}


Measurable = Contestant | Run


class Counter(Protocol):
    """Counts the bytes allocated on a device."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """Return the peak since the last call."""
        ...


class Allocator:
    """Counter of torch's caching allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        found = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return found


class Marks:
    """The marks of one step. Bytes that were allocated before the constructor are not included."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._base, self._standing, self._parameters = counter, counter.allocated(), 0, 0
        self._module: nn.Module | None = None
        self.found: list[Mark] = []

    def forward_done(self) -> None:
        if self._module is not None:
            self._add("loss")

    @contextmanager
    def watching(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Record one step of `module`, which has no gradients at the start. blocks: whose forward passes get a mark."""
        self.found, self._module = [], module
        self._parameters = sum(_sizes([*module.parameters(), *module.buffers()]).values())
        self._standing = self._counter.allocated() - self._base
        self._counter.peak()
        hooks = [p.register_post_accumulate_grad_hook(lambda _: self._add("gradient")) for p in module.parameters()]
        hooks += [block.register_forward_hook(lambda *_: self._add("block")) for block in blocks]
        try:
            yield
        finally:
            self._add("update")
            self._module = None
            for hook in hooks:
                hook.remove()

    def _add(self, label: str) -> None:
        assert self._module is not None
        held = sum(_sizes([p.grad for p in self._module.parameters() if p.grad is not None]).values())
        now, peak = self._counter.allocated() - self._base, self._counter.peak() - self._base
        rest = max(0, now - self._standing - held)
        values = (self._parameters, self._standing - self._parameters, held, rest, max(0, peak - now))
        self.found.append({"mark": label, "peak": peak, **dict(zip(CATEGORIES, values, strict=True))})


def _sizes(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def contestants(arms: Sequence[str], peers: Sequence[Contestant]) -> list[Measurable]:
    """Return the contestants, the BF16 baseline first. Raises ValueError for an invalid arm, or one with `alone` or
    a CUDA graph.
    """
    parsed = [Arm.parse(text) for text in arms]
    if alone := next((each for each in parsed if each.alone), None):
        raise ValueError(f"{str(alone)!r}: every run is alone on its GPU")
    if recorded := next((each for each in parsed if each.recorded), None):
        raise ValueError(f"{str(recorded)!r}: a recorded step has no moments to sample; leave out cuda_graph=true")
    found: list[Measurable] = [
        *peers,
        *(Run(name=str(arm), arm=arm, baseline=arm.recipe == "bf16" and not arm.overrides) for arm in parsed),
    ]
    return sorted(found, key=lambda each: not each.baseline)


def measure(
    found: Sequence[Measurable],
    work: Work,
    *,
    batches: Sequence[int],
    limit: int,
    rounds: int = 5,
    warm_up: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return `rows` in order. batches: micro-batch sizes in sequences; the first is timed and drawn. limit: bytes of a
    GPU, for the largest micro-batch.
    """
    rows = []
    for each in found:
        row: Row = {"name": each.name, "baseline": each.baseline}
        if each.missing:
            row["error"] = each.missing
        else:
            try:
                row |= _in_process(each, work, batches, rounds, warm_up)
            except Exception as error:
                row["error"] = cause(error)
        say(f"{each.name}: {row.get('error', 'measured')}")
        rows.append(row)
    first = next((row for row in rows if row["baseline"] and "peak" in row), None)
    for row in (each for each in rows if "peak" in each):
        row["of_baseline"] = None if first is None else first["peak"] / row["peak"]
        row["largest"] = largest_batch(row["points"], int(SHARE * limit))
    about = {"sizes": work.sizes, "seq_len": work.seq_len, "batches": list(batches), "limit": limit}
    return about | {"tokens_per_step": work.tokens, "rows": rows}


def largest_batch(points: Sequence[tuple[int, int]], limit: int) -> int | None:
    """Return the sequences of the largest micro-batch that fits, by the line through first and last (batch, peak)."""
    (small, low), (large, high) = sorted([points[0], points[-1]])
    if small == large or high <= low:
        return None
    slope = (high - low) / (large - small)
    return max(0, math.floor(large + (limit - high) / slope))


def _in_process(each: Measurable, work: Work, batches: Sequence[int], rounds: int, warm_up: int) -> Row:
    given = (each, replace(work), tuple(batches), rounds, warm_up)
    if work.device.type != "cuda":
        return measure_one(*given)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_one, *given).result()


def measure_one(each: Measurable, work: Work, batches: Sequence[int], rounds: int, warm_up: int) -> Row:
    """Measure one contestant and return its row."""
    row: Row = each.facts(work) if isinstance(each, Run) else {}
    points = []
    for batch in batches:
        found = _step(each, replace(work, batch=batch), rounds if batch == batches[0] else 0, warm_up)
        points.append((batch, found["peak"]))
        row = found | row
        torch.compiler.reset()
        gc.collect()
        if work.device.type == "cuda":
            torch.cuda.empty_cache()
    return row | {"points": points}


def _step(each: Measurable, work: Work, rounds: int, warm_up: int) -> Row:
    on_gpu = work.device.type == "cuda"
    storages = None if on_gpu else Storages()
    counting: AbstractContextManager[Any] = nullcontext() if storages is None else storages
    with counting:
        marks = Marks(storages or Allocator(work.device))
        module, step = each.train(work, marks.forward_done)
        losses = [float(step()) for _ in range(warm_up)]
        blocks: Any = module.blocks if isinstance(each, Run) else ()  # hooks of a peer's blocks would be compiled
        with marks.watching(module, blocks):
            step()
    row = summary(marks.found) | {"marks": marks.found, "loss": [losses[0], losses[-1]]}
    if on_gpu:
        row["reserved"] = torch.cuda.max_memory_reserved(work.device)
    times = []
    for _ in range(rounds):
        with Interval(work.device) as interval:
            step()
        times.append(interval.ms)
    if times:
        row |= {"times_ms": times, "tokens_per_s": work.tokens / statistics.median(times) * 1e3}
    return row


def summary(marks: Sequence[Mark]) -> Row:
    """Return the bytes for the columns of a row."""
    loss = next(mark for mark in marks if mark["mark"] == "loss")
    standing = {name: loss[name] for name in CATEGORIES[:2]}
    gradients = max(mark["gradients"] for mark in marks)
    return standing | {
        "gradients": gradients,
        "activations": loss["activations"],
        "peak": max(mark["peak"] for mark in marks),
    }
