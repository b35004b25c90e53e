"""The training loop. A step never synchronises with the device:

    for each micro-batch: draws = seeds.at(step, first token); backward of (sum of token losses / targets of the step)
    norm = |gradient|; bad = loss or norm not finite, or too large to square (`train.diagnostics.divergence`)
    the optimizer divides gradients by max(norm / max_grad_norm, 1), and skips the update if bad
    metrics are copied to the host asynchronously and logged one step later

On a step that telemetry observes, an extra pass runs first and changes nothing (`train.diagnostics.telemetry`).

A NaN costs one step, not the run: the skip is decided, applied and counted on the device. After `max_nonfinite_steps`
skipped steps in a row the run saves and stops; a run that ends without any update fails. A step depends on its index
alone (data, draws, learning rate), so the state of a run is the model, the optimizer, the step and two counters; with
updates in the backward pass also the norms by which these clip (`optim.in_backward`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from lowprec_train.data.corpus import Corpus
from lowprec_train.data.loader import Batch
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.ops.codecs import StateCodec
from lowprec_train.optim.accumulation import GradientSums
from lowprec_train.optim.in_backward import UpdatesInBackward
from lowprec_train.optim.norm import clip_divisor, norm_and_squares
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.optim.schedule import Schedule
from lowprec_train.optim.shard import Shard
from lowprec_train.parallel.data import DataParallelContext, SingleProcess
from lowprec_train.parallel.placement import Placements
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.train.checkpoint import Checkpointer, CheckpointError, ModelState, OptimizerState
from lowprec_train.train.cuda_graph import GraphedPasses
from lowprec_train.train.diagnostics.divergence import Skips, TrainingDiverged, usable
from lowprec_train.train.diagnostics.telemetry import Record, Row, Telemetry, aggregates
from lowprec_train.train.logging.metrics import DeferredMetrics, Instant, Throughput, memory
from lowprec_train.train.logging.sinks import Sink
from lowprec_train.train.prefetcher import Prefetcher, load_step
from lowprec_train.train.step_passes import MicroBatch, MicroBatchLoss, Passes, StepPasses
from lowprec_train.train.stop_consensus import StopConsensus

EVALUATION_STEP = 1 << 32
"""Step number for the draws of evaluations; no training step reaches it."""

_IN_ROW = "train/skipped_in_row"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The settings of a training loop. `train.checks` checks them before anything is built."""

    steps: int
    tokens_per_step: int  # over all processes, a multiple of micro_batch * seq_len; the rest is gradient accumulation
    micro_batch: int  # sequences per forward and backward pass
    seq_len: int
    max_grad_norm: float  # 0: no clipping
    max_nonfinite_steps: int  # in a row, after which the run saves and stops
    seed: int  # a checkpoint with another seed is refused
    eval_interval: int  # in steps; an evaluation also follows the last step
    eval_batches: int  # micro-batches of the validation split
    cuda_graph: bool = False  # record the passes of a step as a CUDA graph, and repeat it
    in_backward: bool = False  # update each parameter when its gradient is complete
    grad_accumulation: StateCodec | None = None  # codec of matrix gradients until the update; None: FP32
    log_update_rms: bool = False  # of matrices and of the embedding, before each update
    log_interval: int = 1  # in steps; evaluations, observed steps and the last step are always logged
    throughput: Throughput | None = None  # None: only tokens per second


class Trainer:
    """Trains `model` on `corpus`.

    Args:
        model: has `loss(tokens, targets, normalizer, documents, draws) -> 0-dim FP32 tensor`, the sum of the token
            losses / normalizer. normalizer is a 0-dim FP32 tensor on the model's device.
        schedule: 0-based step -> learning rate.
        corpus: its batches are pure functions of the step.
        seeds: source of the draws of each micro-batch; None for a model without draws.
        precision: sets the model's recipes at each step; None: the model keeps its recipes.
        telemetry: observes some of the steps; None: none.
        data_parallel: communication with the processes that share a step; None: a single process.
        placements, shards: of the sharded parameters; None: all parameters are whole.
    """

    def __init__(
        self,
        options: TrainingOptions,
        *,
        model: nn.Module,
        optimizer: CodedOptimizer,
        schedule: Schedule,
        corpus: Corpus,
        seeds: SeedTable | None,
        precision: PrecisionSchedule | None = None,
        telemetry: Telemetry | None = None,
        placements: Placements | None = None,
        shards: Mapping[nn.Parameter, Shard] | None = None,
        data_parallel: DataParallelContext | None = None,
    ) -> None:
        self.options, self.model, self.optimizer, self.schedule = options, model, optimizer, schedule
        self.loss = MicroBatchLoss(model, precision)
        self.corpus, self.seeds, self.device = corpus, seeds, next(model.parameters()).device
        self.throughput = options.throughput or Throughput(tokens_per_step=options.tokens_per_step)
        self.precision, self.data_parallel = precision, data_parallel or SingleProcess()
        self.placements, self.shards = placements, shards
        self.telemetry = telemetry or Telemetry(model, optimizer)
        self._sums, self._in_backward = self._gradients()
        self.passes = self._run_passes()
        self.steps_done = 0
        self._times = {"step_ms": 0.0, "data_ms": 0.0}  # of the newest step whose time is known
        self._last_loss: float | None = None  # validation loss, in this launch
        self.remembered: dict[str, str] = {}
        load = partial(
            load_step,
            micro_batch=options.micro_batch,
            pinned=self.device.type == "cuda",
            index=self.data_parallel.index,
            count=self.data_parallel.count,
        )
        per_step = options.tokens_per_step // options.seq_len
        self._prefetcher = Prefetcher(partial(load, corpus.train, per_step=per_step), steps=options.steps)
        self._load_valid = partial(load, corpus.valid, 0, per_step=options.eval_batches * options.micro_batch)
        self._skips = Skips(self.device, len(list(model.parameters())))
        self._skipped, self._skipped_in_row = self._skips.total, self._skips.in_row

    def fit(
        self,
        *,
        sinks: Sequence[Sink],
        checkpointer: Checkpointer | None = None,
        should_stop: Callable[[], int] = lambda: 0,
        consensus: StopConsensus | None = None,
        write_rows: Callable[[Sequence[Row]], None] = lambda rows: None,
        begin_step: Callable[[int], None] = lambda step: None,
    ) -> Literal["done", "preempted"]:
        """Train up to `steps`, or until `should_stop` requests a stop, and save. The sinks stay open.

        should_stop: called after each step; returns 0, or the number of the signal that requests a stop.
        consensus: turns the request into a decision of all processes.
        write_rows: receives the rows of every step that telemetry observed; its series go to the sinks.
        begin_step: called before each step with its number, counted from 1.

        Raises:
            TrainingDiverged: after a checkpoint, whose state has no skipped step.
            NothingTrained: at the end, as `Skips.judge` describes.
            CheckpointError: a save failed, also in the background, or was refused because a value is not finite.
        """
        pending: DeferredMetrics | None = None
        consensus = consensus or StopConsensus()
        self.model.train()
        while self.steps_done < self.options.steps:
            begin_step(self.steps_done + 1)
            begin = pending.end if pending is not None else Instant(self.device)
            metrics = self.step() | consensus.metrics()
            previous, pending = pending, DeferredMetrics(self.steps_done, metrics, begin, self.device)
            failed = None if previous is None else self._report(previous, sinks, write_rows)
            if checkpointer is not None and not failed:  # a failed run saves, and says why it could not
                checkpointer.check()
            last = self.steps_done == self.options.steps
            request = should_stop() or (checkpointer is not None and checkpointer.failed)
            stop = consensus.agree(request, **self._times) and not last
            save = checkpointer is not None and (stop or last or checkpointer.due(self.steps_done))
            if failed or stop or save or self._evaluation_due():
                failed = self._report(pending, sinks, write_rows) or failed
                pending = None
            if failed:
                self._stop(failed, checkpointer)
            if save:
                self._save(checkpointer, wait=stop or last)
            if stop:
                return "preempted"
        consensus.close()
        loss = self._last_loss or self.evaluate()["valid/loss"]
        measured = self._in_backward is not None and bool(self.options.max_grad_norm)  # in the first step
        self._skips.judge(self.options.steps, self.options.max_nonfinite_steps, loss, measured=int(measured))
        return "done"

    def step(self) -> dict[str, Tensor | float]:
        """Do one update. The returned tensors are 0-dim and on the device; nothing waits for them."""
        if self.precision is not None:
            self.precision.begin(self.model, self.steps_done)
        self.optimizer.prefetch()
        begin = time.perf_counter()
        batch = self._prefetcher.take(self.steps_done)
        data_ms = (time.perf_counter() - begin) * 1e3
        normalizer = self.data_parallel.total(self._to_device(batch.targets)).clamp(min=1.0)
        first = self.steps_done * len(batch.micro) + 1
        micro = [self._on_device(each, self.steps_done, number) for number, each in enumerate(batch.micro, first)]
        record: Record | None = None
        if self.telemetry.due(self.steps_done + 1):
            self.data_parallel.prepare()
            with self.data_parallel.without_reduction():
                record = self.telemetry.probe(lambda: self.loss(micro[0], normalizer))
        lr = self.schedule(self.steps_done)
        self.optimizer.set_lr(lr)
        loss = self.passes(micro, normalizer)
        self.data_parallel.end_step()
        norm, watched = self._update(loss, record)
        self.steps_done += 1
        if record is not None:
            self.telemetry.send(self.steps_done, record, self.device)
        return {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            **watched,
            "train/skipped": self._skipped.clone(),
            _IN_ROW: self._skipped_in_row.clone(),
            "data/tokens": float(self.steps_done * self.options.tokens_per_step),
            "time/data_ms": data_ms,
            **self.data_parallel.metrics(),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss per target token over fixed validation batches, with draws for evaluations."""
        batch = self._load_valid()
        one = torch.ones((), device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        self.data_parallel.prepare()
        for micro in batch.micro:
            total += self.loss(self._on_device(micro, EVALUATION_STEP), one).double()
        self.model.train()
        targets = self.data_parallel.total(self._to_device(batch.targets.double())).clamp(min=1.0)
        return {"valid/loss": float(self.data_parallel.total(total)) / float(targets)}

    def checkpoint_parts(self) -> dict[str, Stateful]:
        """Return the parts that `Checkpointer.save` and `.load` accept."""
        return {
            "model": ModelState(self.model, self.placements, self.optimizer),
            "optimizer": OptimizerState(self.model, self.optimizer, self.placements),
            "trainer": self,
            **self.data_parallel.state_parts(),
            **({} if self.precision is None else self.precision.state_parts(self.model)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the counters and the strings of the sinks. The counters are the live tensors."""
        return {
            "step": self.steps_done,
            "seed": self.options.seed,
            "tokens_per_step": self.options.tokens_per_step,
            "skipped": self._skipped,
            "skipped_in_row": self._skipped_in_row,
            "remembered": json.dumps(self.remembered, sort_keys=True),
            **self._clipping(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after `state_dict["step"]` steps. Raises ValueError if that run has another seed or step size, and
        therefore another data order.
        """
        for name in ("seed", "tokens_per_step"):
            found, expected = state_dict[name], getattr(self.options, name)
            if found != expected:
                raise ValueError(f"the checkpoint is of a run with {name}={found}, this one has {expected}")
        self.steps_done = state_dict["step"]
        self._skipped.copy_(state_dict["skipped"])
        self._skipped_in_row.copy_(state_dict["skipped_in_row"])
        self.remembered.clear()
        self.remembered.update(json.loads(state_dict["remembered"]))
        for name, tensor in self._clipping().items():
            tensor.copy_(state_dict[name])

    def _clipping(self) -> dict[str, Tensor]:
        """Return the state of clipping in the backward pass: the live norms of the last two steps."""
        if self._in_backward is None or not self.options.max_grad_norm:
            return {}
        return {"last_norms": self._in_backward.norms}

    def _gradients(self) -> tuple[GradientSums | None, UpdatesInBackward | None]:
        """Create the consumers of gradients in the backward pass. Sums come first: an update needs the sum."""
        codec, in_backward = self.options.grad_accumulation, self.options.in_backward
        made = [(place, p) for place, p in enumerate(self.model.parameters()) if p.requires_grad]
        complete = [(place, p) for place, p in made if self.data_parallel.complete_in_backward(p)]
        matrices = [(place, p) for place, p in complete if p.ndim >= 2]
        sums = None
        if codec is not None:
            sums = GradientSums(matrices, codec, seed=self.options.seed, shards=self.shards, in_backward=in_backward)
        clips = bool(self.options.max_grad_norm)  # vectors by the norm itself, in any layout
        units, updated = self.data_parallel.reduced_together(), [p for _, p in (matrices if clips else complete)]
        if not in_backward:
            return sums, None
        return sums, UpdatesInBackward(self.optimizer, updated, units, max_norm=self.options.max_grad_norm)

    def _on_device(self, micro: Batch, step: int, number: int | None = None) -> MicroBatch:
        """Copy a micro-batch to the device, with its draws. number: of a micro-batch of the run."""
        part = micro.moved(lambda x: x.to(self.device, non_blocking=True))  # asynchronous from pinned memory
        draws = None if self.seeds is None else self.seeds.at(step, micro.first * self.options.seq_len)
        sums = self.options.grad_accumulation
        counts = number is not None and sums is not None and sums.stochastic
        counted = self._to_device(torch.tensor([number])) if counts else None
        return MicroBatch(part.tokens, part.targets, part.documents, draws, counted)

    def _run_passes(self) -> StepPasses:
        """Create what runs the passes of a step."""
        passes = Passes(
            self.loss, self.data_parallel, device=self.device, sums=self._sums, in_backward=self._in_backward
        )
        if not self.options.cuda_graph:
            return passes
        parameters = list(self.model.parameters())
        return GraphedPasses(passes, self.data_parallel, parameters, self.device, schedule=self.precision)

    def _update(self, loss: Tensor, record: Record | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Clip, update or skip, and count. Returns the gradient norm before clipping and the update's metrics."""
        known = {p: s for each in (self._sums, self._in_backward) if each is not None for p, s in each.squares.items()}
        norm, squares = norm_and_squares(self.model.parameters(), self.shards, known)
        scale = clip_divisor(norm, self.options.max_grad_norm)
        taken = usable(loss, norm, scale)
        observer = None if record is None else record.state
        measures = self._in_backward is not None and self._in_backward.measures
        found_inf = (~taken | measures).float()
        watched = self._update_rms(scale) if self.options.log_update_rms else {}
        self.optimizer.step(grad_scale=scale, found_inf=found_inf, observer=observer)
        for parameter in () if self._sums is None else self._sums.gradients():
            self.optimizer.step_only([parameter], grad_scale=scale, found_inf=found_inf)
        self.optimizer.zero_grad(set_to_none=True)
        self._skips.count(taken, torch.stack(squares))
        if self._in_backward is not None:
            self._in_backward.end(norm, taken)
        return norm, watched

    def _update_rms(self, scale: Tensor) -> dict[str, Tensor]:
        """Return the largest update RMS of the matrices without the embedding, and that of the embedding."""
        looked_up = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}
        found = {p: rms for p, rms in self.optimizer.update_rms(grad_scale=scale).items() if p.ndim >= 2}
        sides = {
            "optim/update_rms": [rms for p, rms in found.items() if p not in looked_up],
            "optim/update_rms_embedding": [rms for p, rms in found.items() if p in looked_up],
        }
        return {name: torch.stack(values).amax() for name, values in sides.items() if values}

    def _to_device(self, tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(self.device, non_blocking=True)

    def _evaluation_due(self) -> bool:
        return self.steps_done % self.options.eval_interval == 0 or self.steps_done == self.options.steps

    def _report(
        self,
        pending: DeferredMetrics,
        sinks: Sequence[Sink],
        write_rows: Callable[[Sequence[Row]], None],
    ) -> dict[str, float] | None:
        """Read a step's metrics, evaluate if due, and log. Return the metrics if the run has diverged at this step, and
        with them `step`, and the steps skipped in a row as `skipped`.
        """
        metrics, seconds = pending.read()
        in_row = int(metrics.pop(_IN_ROW))
        metrics["time/step_ms"] = seconds * 1e3
        metrics |= self.throughput.of_step(pending.step - 1)(seconds) | memory(self.device)
        self._times = {"step_ms": metrics["time/step_ms"], "data_ms": metrics["time/data_ms"]}
        if rows := self.telemetry.read(pending.step):
            write_rows(rows)
        newest = pending.step == self.steps_done
        evaluated = self.evaluate() if newest and self._evaluation_due() else {}
        self._last_loss = evaluated.get("valid/loss", self._last_loss)
        if evaluated or rows or pending.step % self.options.log_interval == 0:
            for sink in sinks:
                sink.log(pending.step, metrics | aggregates(rows) | evaluated)
        diverged = in_row >= self.options.max_nonfinite_steps
        return metrics | {"step": pending.step, "skipped": in_row} if diverged else None

    def _stop(self, at: Mapping[str, float], checkpointer: Checkpointer | None) -> NoReturn:
        """Save, and raise with the numbers of the step at which the run has diverged."""
        unsaved = ""
        try:
            self._save(checkpointer, wait=True)
        except CheckpointError as failure:
            unsaved = str(failure)
        names = [name for name, _ in self.model.named_parameters()]
        bad = self._skips.gradients(names, self.data_parallel.anywhere)
        raise TrainingDiverged(
            step=int(at["step"]),
            skipped=int(at["skipped"]),
            **{name: at[f"train/{name}"] for name in ("loss", "grad_norm", "lr")},
            gradients=bad,
            saved=self.steps_done if checkpointer is not None else None,
            unsaved=unsaved,
        )

    def _save(self, checkpointer: Checkpointer | None, *, wait: bool) -> None:
        if checkpointer is not None:
            checkpointer.save(self.checkpoint_parts(), self.steps_done, wait=wait, only_finite=True)
