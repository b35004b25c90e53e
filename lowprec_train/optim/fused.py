"""AdamW's step on many tensors in a few launches: our kernel, or torch's for what is FP32 throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowprec_train.ops.library import SERVED
from lowprec_train.optim.slots import Held, Wording, listed, steps_after, wording


def step_plain(
    group: dict[str, Any], members: Sequence[Held], grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """Update FP32 parameters with FP32 moments."""
    beta1, beta2 = group["betas"]
    adamw(
        params=[held.parameter for held in members],
        grads=[held.gradient for held in members],
        exp_avgs=[held.state["exp_avg"] for held in members],
        exp_avg_sqs=[held.state["exp_avg_sq"] for held in members],
        max_exp_avg_sqs=[],
        state_steps=[held.state["step"] for held in members],
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def step_served(
    group: dict[str, Any],
    members: Sequence[Held],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    seed: int,
    clip: bool,
) -> list[Held]:
    """Update what our kernel serves, the tensors of like codecs in one call; returns the rest. It knows of no other
    rank and of no place in a whole: pieces that need these are left.
    """
    alike: dict[tuple[Wording, torch.dtype, torch.device], list[Held]] = {}
    rest = []
    for held in members:
        words, parameter = wording(held.slot), held.parameter
        served = "adamw" in SERVED.get(parameter.device.type, ()) and parameter.is_contiguous() and not held.empty
        if words is None or not served or not held.slot.placeless or (clip and held.slot.holders is not None):
            rest.append(held)
        else:
            alike.setdefault((words, held.gradient.dtype, parameter.device), []).append(held)
    for (words, dtype, _), those in alike.items():
        gradients = [held.gradient.contiguous() for held in those]
        if dtype not in (torch.float32, torch.bfloat16):
            gradients = [gradient.float() for gradient in gradients]
        _call(group, words, those, gradients, grad_scale, found_inf, seed, clip)
    return rest


def _call(
    group: dict[str, Any],
    words: Wording,
    members: list[Held],
    gradients: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    seed: int,
    clip: bool,
) -> None:
    states = [held.state for held in members]
    beta1, beta2 = group["betas"]
    done = steps_after(states).double()
    torch.ops.lowprec.adamw(
        [held.parameter for held in members],
        gradients,
        listed(states, "exp_avg"),
        listed(states, "exp_avg_sq"),
        listed(states, "master"),
        [state["step"] for state in states],
        torch.stack([1.0 - beta**done for beta in (beta1, beta2)]),
        torch.stack([held.slot.index for held in members]) if "stochastic" in words.master else None,
        grad_scale,
        found_inf,
        words.first,
        words.second,
        words.master,
        words.group,
        [held.slot.segments for held in members],
        seed,
        group["lr"],
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        clip,
    )
