"""Choices that exclude each other, or that a library in this project's place does not take (TransformerEngine, apex):
ValueError with both settings, before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowprec_train import nvidia
from lowprec_train.config import RunConfig
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodec
from lowprec_train.ops.updates import Rule
from lowprec_train.optim import apex
from lowprec_train.optim.codecs import Codecs
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.schedule import Phase

OPTIM_BACKENDS = ("own", "apex")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run asks for, and what is made of it. rule, codecs: of the optimizer. sums: what stores sums of gradients;
    None: autograd adds them up in FP32.
    """

    run: RunConfig
    phases: Sequence[Phase]
    rule: Rule
    codecs: Codecs
    sums: StateCodec | None

    def check_memory(self, grid: Sizes, *, on_gpu: bool = False) -> None:
        """Choices that save memory, against what they exclude."""
        self._check_offload(grid, on_gpu)
        self._check_loss_chunk()
        run, rule, sums, clash = self.run, self.rule, self.sums, self._after_backward()
        if run.log_update_rms and not isinstance(rule, AdamWRule):
            raise ValueError(f"log_update_rms=true is of AdamW's second moments, and {rule} has none")
        if run.optim.in_backward and (told := clash or self._in_backward(grid)):
            raise ValueError(f"optim.in_backward=true frees gradients inside of the backward pass: {told}")
        if sums is not None and clash:
            raise ValueError(
                f"optim.grad_accumulation={sums} leaves no FP32 gradients after the backward pass: {clash}"
            )

    def check_libraries(self, device: torch.device) -> None:
        """The libraries are there, run on this device, and take what is asked of them."""
        run = self.run
        for backend in dict.fromkeys(phase.backend for phase in self.phases):
            if backend is not None:
                backend.check_machine(device)
        if run.optim.backend not in OPTIM_BACKENDS:
            raise ValueError(f"optim.backend={run.optim.backend!r} is none of {', '.join(OPTIM_BACKENDS)}")
        if run.optim.backend == "apex":
            apex.check(self.rule, self.codecs, device)
        if run.model.norm_backend == "apex":
            self._check_apex_norms(device)

    def _check_apex_norms(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"model.norm_backend=apex computes on CUDA GPUs, and this run is on {device}")
        for phase in self.phases:
            if (saved := phase.saved_activations.norm) is not None:
                raise ValueError(f"model.norm_backend=apex: norms that save {saved} are our own alone")
        nvidia.apex_norms()

    def _check_loss_chunk(self) -> None:
        """A head with a recipe rounds under scales, and with draws, of all tokens."""
        chunk = self.run.model.loss_chunk
        if chunk is not None and any(not phase.recipes["head"].is_identity for phase in self.phases):
            raise ValueError(
                f"model.loss_chunk={chunk} multiplies the head's values a chunk of tokens at a time, and "
                "precision.policy gives the head a recipe that rounds; lowprec_train.recipes.bf16.recipe does not"
            )

    def _check_offload(self, grid: Sizes, on_gpu: bool) -> None:
        if not self.run.optim.offload:
            return
        if watched := self._watched():
            raise ValueError(f"optim.offload=true keeps states on the host: {watched}")
        if on_gpu and grid.processes > 1:
            raise ValueError(
                f"optim.offload=true is for one GPU, and there are {grid.processes}, which share states already: a "
                "checkpoint's shards would lie on the host and on GPUs at once"
            )

    def _watched(self) -> str:
        if self.run.telemetry_interval:
            interval = self.run.telemetry_interval
            return f"telemetry_interval={interval} looks at them; telemetry_interval=0 does not"
        return "log_update_rms=true looks at them; log_update_rms=false does not" if self.run.log_update_rms else ""

    def _after_backward(self) -> str:
        """What needs FP32 gradients after the backward pass; "" for nothing."""
        if watched := self._watched():
            return watched
        recipes = [recipe for phase in self.phases for recipe in phase.recipes.values()]
        sloped = [each for each in recipes if not isinstance(each.estimator, StraightThrough)]
        if self.run.parallel.param_all_gather == "quantized" and sloped:
            return (
                f"parallel.param_all_gather=quantized multiplies {sloped[0].estimator} into gradients after it; "
                "param_all_gather=bf16 does not"
            )
        return ""

    def _in_backward(self, grid: Sizes) -> str:
        """What needs more than one parameter's gradient on this rank; "" for nothing."""
        if norm := self.run.max_grad_norm:
            return f"max_grad_norm={norm} divides by the norm of all gradients; max_grad_norm=0 does not"
        if grid.dp_shard * grid.tp == 1:
            return ""
        shards = f"all shards (parallel.dp_shard={grid.dp_shard}, tp={grid.tp})"
        for codec in (*self.codecs.moments, self.codecs.master):
            if codec.one_scale:
                return f"{codec} needs the amax of {shards}; codecs with scales of groups, and FP32 and BF16, do not"
        if self.rule.gathers or self.rule.needs_rms:
            return f"{self.rule} needs {shards} of a matrix; AdamW without clip_updates does not"
        return ""


def check_settings(run: RunConfig, phases: Sequence[Phase]) -> None:
    """What a library that runs linear layers cannot do in this project, whatever the machine."""
    for backend in filter(None, (phase.backend for phase in phases)):
        for key, value, allowed, why in (
            ("parallel.tp", run.parallel.tp, 1, "its layers hold whole weights"),
            ("telemetry_interval", run.telemetry_interval, 0, "its roundings are its own, and nobody else sees them"),
            ("model.recompute", run.model.recompute, "none", "a block that runs again would run outside of its pass"),
        ):
            if value != allowed:
                raise ValueError(f"{key}={value}: {backend} runs linear layers, and {why}; {key}={allowed}")
        if backend.stateful and len(phases) > 1:
            raise ValueError(
                f"precision.schedule: {backend} remembers earlier steps, which a checkpoint of another phase has not; "
                "scaling=current and scaling=block remember nothing"
            )
