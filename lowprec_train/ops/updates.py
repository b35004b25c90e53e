"""One step of an optimizer on stored tensors: a rule computes new values, codecs store them.

    old = decode(state),   new moments = rule(old, gradient),   new weight = rule(weight, new moments),   encode(new)

New weights are computed from new moments before these are rounded. First moments that are cast or have one scale per
tensor are rounded by `codecs.decaying`, others to nearest or as their codec says. Each operation rounds by itself, so
that a compiled kernel can give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lowprec_train.ops.codecs import BITS, StateCodecs, Values, as_matrix
from lowprec_train.ops.philox import philox

STREAM = 1 << 16
"""Stream of random bits for master weights; streams of linear layers start at 0 (`numerics.draws`)."""

GRADIENT_STREAM = STREAM + 1
"""Stream of random bits for sums of gradients (`optim.accumulation`)."""

SLICE = 1 << 24  # elements converted to FP64 at a time


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Step:
    """Inputs of a rule for one tensor's step, besides values.

    lr: 0-dim FP64 on the device, or a float. count: number of this update, from 1, 0-dim FP32. rms: root of the mean,
    over the whole tensor, of the elements that `Rule.squares` sums, 0-dim FP32. gather: gathers the whole matrix from
    shards [n, k]; all ranks with shards must call it. shard: the inverse.
    """

    lr: Tensor | float
    weight_decay: float
    count: Tensor
    rms: Tensor | None = None
    gather: Callable[[Tensor], Tensor] = _identity
    shard: Callable[[Tensor], Tensor] = _identity


class Rule(Protocol):
    """Update rule for moments and weights, in FP32 [n, k]; a frozen dataclass of hyper-parameters.

    moments: names of a parameter's moments, in the order of their codecs. hidden_matrices_only: vectors, embeddings and
    the head use AdamW instead. gathers: `new_weight` needs whole matrices.
    """

    moments: tuple[str, ...]
    hidden_matrices_only: bool = False
    gathers: bool = False

    @property
    def decays(self) -> Mapping[str, float]:
        """Return the decay factor per step of moments that decay without gradients, by name."""
        return {}

    @property
    def needs_rms(self) -> bool:
        """Return whether `new_weight` needs `Step.rms`."""
        return False

    def new_moments(self, old: Values, gradient: Tensor, step: Step) -> Values:
        """Return the new moments, elementwise, so that a shard's equal those of the whole tensor."""
        ...

    def squares(self, new: Values, gradient: Tensor, step: Step) -> Tensor:
        """Return the sum over the shard for `Step.rms`, 0-dim FP64."""
        raise NotImplementedError

    def new_weight(self, old: Values, new: Values, gradient: Tensor, step: Step) -> Tensor:
        """Return the new weight. old: moments before the step, and the weight as "master". new: moments after it."""
        ...


def amax(rule: Rule, codecs: StateCodecs, old: Values, gradient: Tensor, step: Step) -> Tensor:
    """Return `StateCodecs.amax` of the new values; weights are computed only if their codec has one scale."""
    new = rule.new_moments(old, gradient, step)
    if codecs.master.one_scale:
        new["master"] = rule.new_weight(old, new, gradient, step)
    return codecs.amax(new, gradient.device)


def advance(rule: Rule, old: Values, gradient: Tensor, step: Step) -> Values:
    """Return all new values. Shards need `step.rms` if the rule does."""
    new = rule.new_moments(old, gradient, step)
    if rule.needs_rms and step.rms is None:
        step = replace(step, rms=root_mean(rule.squares(new, gradient, step), gradient.numel()))
    return new | {"master": rule.new_weight(old, new, gradient, step)}


def scaled(gradient: Tensor, grad_scale: Tensor | None) -> Tensor:
    """Return the gradient for the rule, divided by `grad_scale`, FP32 [n, k]."""
    matrix = as_matrix(gradient).float()
    return matrix if grad_scale is None else matrix / grad_scale


def root_mean(total: Tensor, numbers: int | Tensor) -> Tensor:
    """Return sqrt(total / numbers) in FP32, of sums in FP64."""
    return (total / numbers).sqrt().float()


def wide_sum(x: Tensor) -> Tensor:
    """Return the sum in FP64, 0-dim; zero for an empty x. Rounding errors are so small that its FP32 rounding is the
    same in any order and any number of parts of x, except for one case in about 2^27.
    """
    return _sum_slices(x, lambda part: part.sum(dtype=torch.float64))


def wide_squares(x: Tensor) -> Tensor:
    """Return the sum of squares as in `wide_sum`: squares of FP32 numbers are exact."""
    return _sum_slices(x, lambda part: torch.linalg.vector_norm(part, dtype=torch.float64).square())


def sum_squares(xs: Sequence[Tensor]) -> Tensor:
    """Return `wide_squares` of each tensor, FP64 [len(xs)]."""
    return torch.stack([wide_squares(x) for x in xs])


def _sum_slices(x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.flatten().split(SLICE):  # torch converts all of x before it adds
        total = total + add(part)
    return total


def seeds(run_seed: int, parameters: Tensor, steps: Tensor, *, stream: int = STREAM) -> Tensor:
    """Return seeds for rounding parameters, int64 [p]: first 63 bits of Philox4x32-10((parameter, stream, step), run
    seed).

    parameters: indices, int64 [p]. steps: numbers of the updates, [p].
    """
    step = steps.long()
    counter = (parameters, torch.full_like(step, stream), step & 0xFFFFFFFF, step >> 32)
    words = philox(counter, torch.full_like(step[0], run_seed))
    return (words[1] & 0x7FFFFFFF) << 32 | words[0]


def skips(found_inf: Tensor | None, parameters: int) -> Sequence[Tensor | None]:
    """Return whether to skip each parameter, 0-dim bool; None if none is skipped. found_inf: one number or [p]."""
    if found_inf is None:
        return [None] * parameters
    return (found_inf == 1.0).expand(parameters).unbind()


def write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Write value to `target`, unless `skip`; as integers, because not every dtype has a `where`."""
    value = value.to(target.dtype).view(target.shape)
    here, there = target.view(BITS[target.element_size()]), value.view(BITS[target.element_size()])
    here.copy_(there if skip is None else torch.where(skip, here, there))
