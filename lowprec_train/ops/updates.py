"""One step of an optimizer over stored tensors: a rule says what is new, codecs how it is stored.

    old = decode(state),   new moments = rule(old, gradient),   new weight = rule(weight, new moments),   encode(new)

The weights see the new moments before these are rounded. First moments that are cast or lie under one scale are rounded
by `codecs.decaying`, all else to nearest, or as their codec says. Each operation rounds by itself, so that a compiled
kernel can equal it bit for bit.
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
"""The draws' stream of master weights: those of linear layers count from 0 (`numerics.draws`)."""

GRADIENT_STREAM = STREAM + 1
"""That of sums of gradients (`optim.accumulation`)."""

SLICE = 1 << 24  # elements that are in FP64 at a time


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rule is told of one tensor's step.

    count: which update this is, from 1, 0-dim FP32. rms: root of the mean, over the whole tensor, of what
    `Rule.squares` sums, 0-dim FP32. gather: a shard [n, k] -> the whole matrix; all ranks that hold shards call it.
    shard: the way back.
    """

    lr: float
    weight_decay: float
    count: Tensor
    rms: Tensor | None = None
    gather: Callable[[Tensor], Tensor] = _same
    shard: Callable[[Tensor], Tensor] = _same


class Rule(Protocol):
    """What the new moments and weights are, in FP32 [n, k]. A frozen dataclass of hyper-parameters.

    moments: names of what is kept of a parameter, in the order of the codecs that store it. hidden_matrices_only: AdamW
    takes vectors, embeddings and the head. gathers: `new_weight` needs whole matrices.
    """

    moments: tuple[str, ...]
    hidden_matrices_only: bool = False
    gathers: bool = False

    @property
    def decays(self) -> Mapping[str, float]:
        """Of moments that decay without gradients, the factor of a step."""
        return {}

    @property
    def needs_rms(self) -> bool:
        """Whether `new_weight` needs `Step.rms`."""
        return False

    def new_moments(self, old: Values, gradient: Tensor, step: Step) -> Values:
        """Elementwise: a shard's are those of the whole."""
        ...

    def squares(self, new: Values, gradient: Tensor, step: Step) -> Tensor:
        """What `Step.rms` is made of: a sum over the shard, 0-dim FP64."""
        raise NotImplementedError

    def new_weight(self, old: Values, new: Values, gradient: Tensor, step: Step) -> Tensor:
        """old: the moments before the step, and the weight as "master". new: the moments after it."""
        ...


def amax(rule: Rule, codecs: StateCodecs, old: Values, gradient: Tensor, step: Step) -> Tensor:
    """`StateCodecs.amax` of the new values; weights are not computed where theirs is not asked for."""
    new = rule.new_moments(old, gradient, step)
    if codecs.master.one_scale:
        new["master"] = rule.new_weight(old, new, gradient, step)
    return codecs.amax(new, gradient.device)


def advance(rule: Rule, old: Values, gradient: Tensor, step: Step) -> Values:
    """All new values. `step.rms` is given for a shard."""
    new = rule.new_moments(old, gradient, step)
    if rule.needs_rms and step.rms is None:
        step = replace(step, rms=root_mean(rule.squares(new, gradient, step), gradient.numel()))
    return new | {"master": rule.new_weight(old, new, gradient, step)}


def scaled(gradient: Tensor, grad_scale: Tensor | None) -> Tensor:
    """The gradient as the rule sees it, FP32 [n, k]."""
    matrix = as_matrix(gradient).float()
    return matrix if grad_scale is None else matrix / grad_scale


def root_mean(total: Tensor, numbers: int | Tensor) -> Tensor:
    """FP32, of sums in FP64."""
    return (total / numbers).sqrt().float()


def wide_sum(x: Tensor) -> Tensor:
    """The sum in FP64, 0-dim. What it rounds is so small that an FP32 number made of it is the same, but for one case
    in about 2^27, in whatever order and in however many parts x is added. Zero for an empty x.
    """
    return _wide(x, lambda part: part.sum(dtype=torch.float64))


def wide_squares(x: Tensor) -> Tensor:
    """The sum of squares, as `wide_sum`: the squares of FP32 numbers are exact."""
    return _wide(x, lambda part: torch.linalg.vector_norm(part, dtype=torch.float64).square())


def sum_squares(xs: Sequence[Tensor]) -> Tensor:
    """`wide_squares` of each tensor, FP64 [len(xs)]."""
    return torch.stack([wide_squares(x) for x in xs])


def _wide(x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.flatten().split(SLICE):  # torch converts before it adds
        total = total + add(part)
    return total


def seeds(run_seed: int, parameters: Tensor, steps: Tensor, *, stream: int = STREAM) -> Tensor:
    """Seeds of parameters' roundings, int64 [p]: first 63 bits of Philox4x32-10((parameter, stream, step), run seed).

    parameters: their indices, int64 [p]. steps: numbers of the updates, [p].
    """
    step = steps.long()
    counter = (parameters, torch.full_like(step, stream), step & 0xFFFFFFFF, step >> 32)
    words = philox(counter, torch.full_like(step[0], run_seed))
    return (words[1] & 0x7FFFFFFF) << 32 | words[0]


def write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Set `target`, unless `skip`; as integers, because not every dtype has a `where`."""
    value = value.to(target.dtype).view(target.shape)
    here, there = target.view(BITS[target.element_size()]), value.view(BITS[target.element_size()])
    here.copy_(there if skip is None else torch.where(skip, here, there))
