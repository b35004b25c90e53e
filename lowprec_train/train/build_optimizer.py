"""Build a run's optimizer, its codecs and its update rule from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowprec_train.config import RunConfig
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodec
from lowprec_train.ops.updates import Rule
from lowprec_train.optim import accumulation
from lowprec_train.optim.codecs import Codecs
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.optim.shard import Shard
from lowprec_train.train.construct import construct


def codecs(run: RunConfig) -> Codecs:
    """Return the codecs of the optimizer's moments and of the master weights."""
    parts = ("first_moment", "second_moment", "master")
    first, second, master = (construct(getattr(run.optim, part), f"optim.{part}") for part in parts)
    return Codecs(moments=(first, second), master=master)


def rules(run: RunConfig) -> tuple[Rule, AdamWRule]:
    """Return the run's update rule, and AdamW for the parameters that the rule does not cover."""
    adamw = AdamWRule(**{key: getattr(run.optim, key) for key in ("beta1", "beta2", "eps", "clip_updates")})
    return (construct(run.optim.rule, "optim.rule") if run.optim.rule else adamw), adamw


def grad_accumulation(run: RunConfig) -> StateCodec | None:
    """Return the codec of accumulated gradients; None: autograd accumulates them in FP32."""
    node = run.optim.grad_accumulation
    return accumulation.check(construct(node, "optim.grad_accumulation")) if node else None


def optimizer(
    run: RunConfig,
    model: torch.nn.Module,
    shards: Mapping[Any, Shard] | None = None,
    device: torch.device | None = None,
    dp: int | None = None,
) -> CodedOptimizer:
    """Return the optimizer of the model's initial weights. With a reduced-precision master, matrices become BF16.

    device: where updates are computed and parameters are stored from now on; None: where they are now. dp: number of
    data-parallel ranks; if a step then has a single micro-batch, gradients have the dtype of their parameter. None:
    gradients are FP32, as autograd needs them to sum several.
    """
    groups = parameter_groups(model, run.optim.weight_decay, *rules(run))
    options: dict[str, Any] = {"codecs": codecs(run), "backend": run.optim.backend, "shards": shards}
    options |= {"offload": run.optim.offload, "device": device}
    made = CodedOptimizer(groups, lr=run.optim.lr, seed=run.seed, **options)
    single = dp is not None and run.micro_batches(dp) == 1
    if single and not run.optim.grad_accumulation:  # sums of gradients in codes are given back in FP32
        for parameter in (each for each in model.parameters() if each.dtype != torch.float32):
            parameter.grad_dtype = parameter.dtype
    return made
