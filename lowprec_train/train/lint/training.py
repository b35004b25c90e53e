"""Linter rules for the optimizer: moments, master weights, clipping.

Most rules are about updates that are too small for a format. Under rounding to nearest, a number with p mantissa bits
changes only if the update is half a step or more: 1 / (2^(p+1) + 2) of the number where the format is coarsest.
"""

import math
from collections.abc import Iterator

import torch

from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodec
from lowprec_train.train.lint.rules import Fault, RunPlan, Severity, rule

EXPANSION = (1.9, 7.0)
"""Exponents of range expansion for groups of first and second moments (medians; arXiv 2410.19313)."""
WEIGHT = 0.02  # typical magnitude of a trained matrix's entries, and their initial standard deviation
HALF_STEP = 2.0**-12  # of FP16, relative, at the finest place of a binade
SHARE = 0.25  # least share of a run's steps with lost updates
SAMPLES = 100
STILL = 0.9  # least share of a second moment's codes that do not change


def half_step(codec: StateCodec, expansion: float) -> float:
    """Return the largest relative change that rounding of a stored moment may lose; 0 for FP32."""
    if codec.exact:
        return 0.0
    step = 1 / (2.0 ** (parse_format(codec.format).mantissa_bits + 1) + 2)
    return step / expansion if codec.expanded else step


def unmoved(codec: StateCodec, beta: float) -> float:
    """Return the share of a second moment's codes that a step of gradient noise does not change: lognormal magnitudes
    over about four decades, in rows of 1024.
    """
    draws = torch.Generator().manual_seed(0)
    size, spread, gradient = (torch.randn(8, 1024, generator=draws) for _ in range(3))
    square = (4.0 * size).exp()
    steady = 1.0 + math.sqrt(2 * (1 - beta) / (1 + beta)) * spread
    before = codec.encode(square * steady.clamp_min(0.05))
    after = codec.encode(codec.decode(before) * beta + square * gradient.square() * (1 - beta))
    return (before["codes"].float() == after["codes"].float()).float().mean().item()


def typical_update(beta1: float) -> float:
    """Return the typical update of a weight with noise gradients, in learning rates: RMS of m over RMS of g."""
    return math.sqrt((1 - beta1) / (1 + beta1))


@rule(
    severity=Severity.ERROR,
    why="small second moments flush to zero and their updates explode: training diverges (arXiv 2310.18313, figure 8)",
    instead="optim/moment@optim.second_moment=fp16, or e4m3_expanded",
)
def fp8_second_moment(plan: RunPlan) -> Iterator[Fault]:
    second = plan.codecs.moments[1]
    used = plan.uses_adamw or len(plan.rule.moments) > 1
    if used and second.one_scale and second.format in ("E4M3", "E5M2"):
        yield Fault(what=f"optim.second_moment = {second.format} with one scale for the tensor")


@rule(
    why="a moving average that changes by less than half a step of its format does not change (arXiv 2603.16731)",
    instead="a smaller beta, or a finer format",
)
def stalled_moments(plan: RunPlan) -> Iterator[Fault]:
    first, second = plan.codecs.moments
    optim = plan.run.optim
    averages = [("beta1", optim.beta1, first, EXPANSION[0]), ("beta2", optim.beta2, second, EXPANSION[1])]
    averages = averages if plan.uses_adamw else []
    own = {} if isinstance(plan.rule, AdamWRule) else plan.rule.decays
    averages += [(name, beta, first, EXPANSION[0]) for name, beta in own.items()]
    for name, beta, codec, expansion in averages:
        least = half_step(codec, expansion)
        still = unmoved(codec, beta) if name == "beta2" and least else 0.0
        if still >= STILL:
            yield Fault(what=f"beta2={beta} with {codec}, which leaves {still:.0%} of its codes unchanged in a step")
        elif 1 - beta < least:
            yield Fault(what=f"{name}={beta} with {codec}, which may lose changes below {least:.2g}")


@rule(
    why=f"rounding to nearest drops updates below 2^-12 of a weight, and weights are about {WEIGHT}: on a "
    "quadratic at such a rate the loss ends 92 % above FP32's, 7 % with stochastic rounding (arXiv 2010.06192)",
    instead="optim/master=fp16, which rounds stochastically, or fp32",
)
def lost_updates(plan: RunPlan) -> Iterator[Fault]:
    """Updates that FP16 loses. An Adam step changes a weight by the learning rate at most; noisy gradients by less."""
    master = plan.codecs.master
    if master.stochastic or master.exact:
        return
    beta1, steps = plan.run.optim.beta1, plan.run.steps
    least = WEIGHT * HALF_STEP / typical_update(beta1)
    sampled = range(0, steps, max(1, steps // SAMPLES))
    share = sum(plan.learning_rate(step) < least for step in sampled) / len(sampled)
    if share >= SHARE:
        rate = f"optim.lr={plan.run.optim.lr}, a learning rate below {least:.2g} for {share:.0%} of the steps,"
        yield Fault(
            what=f"{rate} with {master}: updates of {typical_update(beta1):.2g} times it (beta1={beta1}) are lost"
        )


@rule(
    why="update clipping takes the place of gradient clipping; together they damp a spike twice (arXiv 2304.13013)",
    instead="max_grad_norm=0",
)
def two_clips(plan: RunPlan) -> Iterator[Fault]:
    if plan.run.optim.clip_updates and not plan.run.optim.rule and plan.run.max_grad_norm > 0:
        yield Fault(what=f"optim.clip_updates=true with max_grad_norm={plan.run.max_grad_norm}")
