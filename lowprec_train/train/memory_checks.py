"""Choices that save memory, against what they exclude: ValueError with both settings, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_train.config import RunConfig
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodec
from lowprec_train.ops.updates import Rule
from lowprec_train.optim.codecs import Codecs
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.schedule import Phase


def check(
    run: RunConfig, grid: Sizes, *, codecs: Codecs, rule: Rule, sums: StateCodec | None, phases: Sequence[Phase]
) -> None:
    """Refuse `optim.in_backward` beside what needs more than one parameter's gradient on this rank, and it or
    `optim.grad_accumulation` beside what needs FP32 gradients after the backward pass. sums: what the latter names.
    """
    if run.log_update_rms and not isinstance(rule, AdamWRule):
        raise ValueError(f"log_update_rms=true is of AdamW's second moments, and {rule} has none")
    clash = _after_backward(run, phases)
    if run.optim.in_backward and (told := clash or _in_backward(run, grid, codecs, rule)):
        raise ValueError(f"optim.in_backward=true frees gradients inside of the backward pass: {told}")
    if sums is not None and clash:
        raise ValueError(f"optim.grad_accumulation={sums} leaves no FP32 gradients after the backward pass: {clash}")


def loss_chunk(run: RunConfig, phases: Sequence[Phase]) -> None:
    """Refuse `model.loss_chunk` beside a head with a recipe: what it rounds has scales and draws of all tokens."""
    if run.model.loss_chunk is not None and any(not phase.recipes["head"].is_identity for phase in phases):
        raise ValueError(
            f"model.loss_chunk={run.model.loss_chunk} multiplies the head's values a chunk of tokens at a time, and "
            "precision.policy gives the head a recipe that rounds; lowprec_train.recipes.bf16.recipe does not"
        )


def offload(run: RunConfig, grid: Sizes, *, on_gpu: bool) -> None:
    """Refuse `optim.offload` beside what looks at states on the device, and on several GPUs."""
    if not run.optim.offload:
        return
    if watched := _watched(run):
        raise ValueError(f"optim.offload=true keeps states on the host: {watched}")
    if on_gpu and grid.processes > 1:
        raise ValueError(
            f"optim.offload=true is for one GPU, and there are {grid.processes}, which share states already: a "
            "checkpoint's shards would lie on the host and on GPUs at once"
        )


def _watched(run: RunConfig) -> str:
    if run.telemetry_interval:
        return f"telemetry_interval={run.telemetry_interval} looks at them; telemetry_interval=0 does not"
    return "log_update_rms=true looks at them; log_update_rms=false does not" if run.log_update_rms else ""


def _after_backward(run: RunConfig, phases: Sequence[Phase]) -> str:
    if watched := _watched(run):
        return watched
    recipes = [recipe for phase in phases for recipe in phase.recipes.values()]
    sloped = [each for each in recipes if not isinstance(each.estimator, StraightThrough)]
    if run.parallel.param_all_gather == "quantized" and sloped:
        return (
            f"parallel.param_all_gather=quantized multiplies {sloped[0].estimator} into gradients after it; "
            "param_all_gather=bf16 does not"
        )
    return ""


def _in_backward(run: RunConfig, grid: Sizes, codecs: Codecs, rule: Rule) -> str:
    if run.max_grad_norm:
        return f"max_grad_norm={run.max_grad_norm} divides by the norm of all gradients; max_grad_norm=0 does not"
    if grid.dp_shard * grid.tp == 1:
        return ""
    shards = f"all shards (parallel.dp_shard={grid.dp_shard}, tp={grid.tp})"
    for codec in (*codecs.moments, codecs.master):
        if codec.one_scale:
            return f"{codec} needs the amax of {shards}; codecs with scales of groups, and FP32 and BF16, do not"
    if rule.gathers or rule.needs_rms:
        return f"{rule} needs {shards} of a matrix; AdamW without clip_updates does not"
    return ""
