"""Settings that exclude each other, and settings that a third-party library (TransformerEngine, apex) does not support.
Raises ValueError with both settings before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowprec_train import nvidia
from lowprec_train.config import RunConfig
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodec, row_segments
from lowprec_train.ops.library import SERVED
from lowprec_train.ops.updates import Rule
from lowprec_train.optim import apex
from lowprec_train.optim.codecs import Codecs
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.schedule import Phase
from lowprec_train.train.construct import construct

OPTIM_BACKENDS = ("own", "apex")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The settings of a run, with its optimizer's rule and codecs. sums: the codec of accumulated gradients; None:
    autograd accumulates them in FP32. columns: of each weight that tensor parallelism divides by columns.
    """

    run: RunConfig
    phases: Sequence[Phase]
    rule: Rule
    codecs: Codecs
    sums: StateCodec | None
    columns: Mapping[str, int]

    def check_memory(self, grid: Sizes, *, on_gpu: bool = False) -> None:
        """Check the settings that save memory against those that exclude them."""
        self._check_offload(grid, on_gpu)
        self._check_loss_chunk()
        self._check_expanded(grid)
        run, rule, sums, clash = self.run, self.rule, self.sums, self._after_backward()
        if run.log_update_rms and not isinstance(rule, AdamWRule):
            raise ValueError(f"log_update_rms=true needs AdamW's second moments, and {rule} has none; set it to false")
        if run.optim.clip_updates and not (isinstance(rule, AdamWRule) or rule.hidden_matrices_only):
            raise ValueError(f"optim.clip_updates=true is for AdamW's updates, and {rule} updates all; set it to false")
        if not (isinstance(rule, AdamWRule) or rule.hidden_matrices_only):
            self._check_unused()
        if run.optim.in_backward and (reason := clash or self._in_backward(grid)):
            raise ValueError(f"optim.in_backward=true frees gradients during the backward pass: {reason}")
        if sums is not None and clash:
            raise ValueError(
                f"optim.grad_accumulation={sums} leaves no FP32 gradients after the backward pass: {clash}"
            )

    def check_graph(self) -> None:
        """Check `cuda_graph` against what a recorded step cannot do: decide on the host, or wait for it."""
        run = self.run
        if not run.cuda_graph:
            return
        for key, value, allowed, why in (
            ("optim.offload", run.optim.offload, False, "the host starts its copies"),
            ("model.offload", run.model.offload, False, "the host starts its copies"),
            ("telemetry_interval", run.telemetry_interval, 0, "observed steps have other kernels"),
            ("profile.steps", run.profile.steps, 0, "a step that is recorded under torch's profiler may never end"),
        ):
            if value != allowed:
                raise ValueError(f"cuda_graph=true repeats one step, but {key}={value}: {why}; use {key}={allowed}")
        if reason := self._not_recorded():
            raise ValueError(f"cuda_graph=true repeats one step, but {reason}")

    def _not_recorded(self) -> str:
        """Return what the host decides in each step; "" for nothing."""
        run, codec = self.run, construct(self.run.comm, "comm").codec
        if codec.shares_scales:
            return f"the head-room of comm={codec} moves between steps; use comm=fp8"
        for backend in filter(None, (phase.backend for phase in self.phases)):
            return f"{backend} keeps its state on the host; use a recipe of this package"
        if self.sums is not None and not run.optim.in_backward:
            return f"optim.grad_accumulation={self.sums} is read after it; use optim.in_backward=true as well"
        if run.optim.in_backward and run.optim.backend != "own":
            return f"optim.backend={run.optim.backend} takes the learning rate from the host; use optim.backend=own"
        return ""

    def check_libraries(self, device: torch.device) -> None:
        """Check that the libraries are installed, run on this device, and support the settings."""
        run = self.run
        for backend in dict.fromkeys(phase.backend for phase in self.phases):
            if backend is not None:
                backend.check_machine(device)
        if run.optim.backend not in OPTIM_BACKENDS:
            raise ValueError(f"optim.backend={run.optim.backend!r} is not one of {', '.join(OPTIM_BACKENDS)}")
        if run.optim.backend == "apex":
            apex.check(self.rule, self.codecs, device)
        if run.model.norm_backend == "apex":
            self._check_apex_norms(device)
        if run.cuda_graph:
            self._check_graph_on(device)

    def _check_graph_on(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"cuda_graph=true needs a CUDA GPU, and this run is on {device} (device={self.run.device})"
            )
        if self.run.optim.in_backward and "adamw" not in SERVED.get("cuda", ()):
            raise ValueError(
                "cuda_graph=true with optim.in_backward=true needs the compiled kernel of AdamW, which reads the "
                "learning rate on the GPU; build it (docs/building.md), or use optim.in_backward=false"
            )

    def _check_apex_norms(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"model.norm_backend=apex needs a CUDA GPU, and this run is on {device}; use model.norm_backend=own"
            )
        for phase in self.phases:
            if (saved := phase.saved_activations.norm) is not None:
                raise ValueError(f"norms that save {saved} need model.norm_backend=own, not apex")
        nvidia.apex_norms()

    def _check_loss_chunk(self) -> None:
        """Check the loss chunk: a quantised head has scales and draws of all tokens, so it cannot run in chunks."""
        chunk = self.run.model.loss_chunk
        if chunk is not None and any(not phase.recipes["head"].is_identity for phase in self.phases):
            raise ValueError(
                f"model.loss_chunk={chunk} computes the head in chunks of tokens, but precision.policy quantises the "
                "head; give the head lowprec_train.recipes.bf16.recipe, or use model.loss_chunk=null"
            )

    def _check_offload(self, grid: Sizes, on_gpu: bool) -> None:
        if not self.run.optim.offload:
            return
        if observed := self._observed():
            raise ValueError(f"optim.offload=true keeps optimizer states in host memory: {observed}")
        if on_gpu and grid.processes > 1:
            raise ValueError(
                f"optim.offload=true supports one GPU, and this run has {grid.processes}, which share the states "
                "already: a checkpoint cannot hold shards on the host and on GPUs; use optim.offload=false"
            )

    def _check_unused(self) -> None:
        """Check that the options of AdamW, which no parameter uses, are at their defaults."""
        for key in ("beta1", "beta2", "eps"):
            if (value := getattr(self.run.optim, key)) != getattr(AdamWRule, key):
                raise ValueError(
                    f"optim.{key}={value} is for AdamW's updates, and {self.rule} updates all; an option of the rule "
                    f"is set by +optim.rule.{key}={value}"
                )

    def _check_expanded(self, grid: Sizes) -> None:
        """Check that a rank's columns are whole segments, at which groups of expanded moments restart."""
        codec = next((each for each in self.codecs.moments if each.expanded), None)
        for name, columns in self.columns.items() if codec is not None else ():
            part, segment = columns // grid.tp, columns // row_segments(columns)
            if columns % grid.tp == 0 and part % segment:
                raise ValueError(
                    f"parallel.tp={grid.tp} gives a rank {part} of the {columns} columns of {name}, and groups of a "
                    f"moment in {codec} (optim.first_moment, optim.second_moment) restart at multiples of {segment}; "
                    "use another tp, or moments that are not expanded"
                )

    def _observed(self) -> str:
        if self.run.telemetry_interval:
            interval = self.run.telemetry_interval
            return f"telemetry_interval={interval} reads them; use telemetry_interval=0"
        return "log_update_rms=true reads them; use log_update_rms=false" if self.run.log_update_rms else ""

    def _after_backward(self) -> str:
        """Return which setting needs FP32 gradients after the backward pass; "" for none."""
        if observed := self._observed():
            return observed
        recipes = [recipe for phase in self.phases for recipe in phase.recipes.values()]
        estimators = [each.estimator for each in recipes if not isinstance(each.estimator, StraightThrough)]
        if self.run.parallel.param_all_gather == "quantized" and estimators:
            return (
                f"parallel.param_all_gather=quantized multiplies gradients by {estimators[0]} after it; "
                "use param_all_gather=bf16"
            )
        return ""

    def _in_backward(self, grid: Sizes) -> str:
        """Return why updates in the backward pass cannot work with these settings; "" if they can."""
        if self.run.steps == 1 and self.run.max_grad_norm:
            return (
                f"steps=1 with max_grad_norm={self.run.max_grad_norm} would update nothing, because the first step "
                "only measures the norms to clip by; use steps=2 or more, or max_grad_norm=0"
            )
        if grid.dp_shard * grid.tp == 1:
            return ""
        shards = f"all shards (parallel.dp_shard={grid.dp_shard}, tp={grid.tp})"
        for codec in (*self.codecs.moments, self.codecs.master):
            if codec.one_scale:
                return f"{codec} needs the amax of {shards}; use codecs with group scales, FP32 or BF16"
        if self.rule.gathers or self.rule.needs_rms:
            return f"{self.rule} needs {shards} of a matrix; use AdamW without clip_updates"
        return ""


def check_settings(run: RunConfig, phases: Sequence[Phase]) -> None:
    """Check settings that a library which runs linear layers does not support here, on any machine."""
    recomputed = "a recomputed block would run outside of its pass"
    for backend in filter(None, (phase.backend for phase in phases)):
        for key, value, allowed, why in (
            ("parallel.tp", run.parallel.tp, 1, "its layers hold whole weights"),
            ("telemetry_interval", run.telemetry_interval, 0, "telemetry cannot observe its roundings"),
            ("model.recompute", run.model.recompute, "none", recomputed),
            ("model.full_recompute_layers", run.model.full_recompute_layers, 0, recomputed),
        ):
            if value != allowed:
                raise ValueError(f"{key}={value}: {backend} runs linear layers, and {why}; use {key}={allowed}")
        if backend.stateful and len(phases) > 1:
            raise ValueError(
                f"precision.schedule: {backend} has state from earlier steps, which a checkpoint of another phase "
                "lacks; use scaling=current or scaling=block, which have none"
            )
