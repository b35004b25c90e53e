"""Updates in the backward pass: a parameter is updated when its gradient is complete, and the gradient is freed (LOMO,
arXiv 2306.09782, for any rule and codecs).

    backward of a layer -> its gradients -> the optimizer's step of these parameters -> no gradients

The norm of all gradients is not known during the pass. Clipping takes for it the smaller of the norms of the last two
steps, or that of the parameter's own gradient if it is larger:

    gradient of p  /=  max(max(min(last norm, last but one), norm of p's gradient) / max_norm, 1)

So the first step, and one whose gradients suddenly grow, are clipped too, though less, and a single long gradient does
not shorten those of the next step. Parameters that are updated after the pass are clipped by the norm itself. All of
these norms have the same bits for any sharding. This form of clipping is ours; LOMO runs a second backward pass, or
bounds each element.

A step with a non-finite loss changes nothing. If a gradient is not finite, or too large to square, its parameter is not
updated and all others are. The ranks with shards of a parameter first all-reduce their sums of squares, so that either
all of them update it or none: one collective for all parameters that are reduced together. Without clipping, the bits
are those of a step after the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lowprec_train.optim.gradient_hooks import after_gradient
from lowprec_train.optim.norm import clip_divisor
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.optim.shard import local
from lowprec_train.optim.tensor_stats import over_groups

LARGEST_SQUARES = 1e38  # of a gradient whose square FP32 holds


class UpdatesInBackward:
    """Updates each of `parameters` when its gradient is complete; `optimizer.step` updates the others.

    max_norm: the norm to which gradients are clipped; 0: they are not.
    units: parameters whose gradients are completed together, because they are reduced together. They are updated when
    the last of them is complete, with one collective for the sums of squares of all. A parameter without a unit is
    updated alone.
    squares: sum of squares of each used gradient on this rank, 0-dim FP64, until the next `begin`.
    norms: of the gradients of the last two steps that were taken, FP32 [2]; infinite before these. Part of a run's
        state.
    """

    def __init__(
        self,
        optimizer: CodedOptimizer,
        parameters: Iterable[nn.Parameter],
        units: Iterable[Sequence[nn.Parameter]] = (),
        *,
        max_norm: float = 0.0,
    ) -> None:
        self._optimizer, self._found_inf, self._max_norm = optimizer, torch.zeros(()), max_norm
        self._active = False
        # Of this backward pass: `.grad` alone does not tell, because earlier micro-batches leave gradients as well.
        self._completed: set[Tensor] = set()
        self.squares: dict[nn.Parameter, Tensor] = {}
        updated = list(parameters)
        self.norms = torch.full((2,), float("inf"), device=updated[0].device if updated else None)
        self._units: dict[Tensor, tuple[nn.Parameter, ...]] = {parameter: (parameter,) for parameter in updated}
        for unit in units:
            members = tuple(parameter for parameter in unit if parameter in self._units)
            self._units.update(dict.fromkeys(members, members))
        for parameter in updated:
            after_gradient(parameter, self._complete)

    def begin(self, loss: Tensor | None) -> None:
        """Call before a backward pass. loss: of the step, 0-dim; None if the micro-batch is not the last of its step,
        so that its gradients are accumulated.
        """
        self._active = loss is not None
        self.squares.clear()
        self._completed.clear()
        if loss is not None:
            self._found_inf = ~loss.isfinite()

    def end(self, norm: Tensor, taken: Tensor) -> None:
        """Call after a step. norm: of all its gradients, 0-dim FP32. taken: whether it was not skipped, 0-dim."""
        self.norms.copy_(torch.where(taken, torch.stack((norm, self.norms[0])), self.norms))

    def _complete(self, parameter: Tensor) -> None:
        """Update the unit of `parameter`, if all of its gradients are complete."""
        if not self._active or parameter.grad is None:
            return
        unit = self._units[parameter]
        self._completed.add(parameter)
        if self._completed.issuperset(unit):
            self._update(unit)

    @torch.no_grad()
    def _update(self, unit: Sequence[nn.Parameter]) -> None:
        """Update the parameters of a unit and free their gradients."""
        gradients = [_gradient(parameter) for parameter in unit]
        squares = torch.ops.lowprec.sum_squares([gradient.contiguous() for gradient in gradients])
        self.squares.update(zip(unit, squares.unbind(), strict=True))
        whole = {parameter: self.squares[parameter] for parameter in unit}
        shared = [(p, group) for p in unit if (group := self._optimizer.group_of(p)) is not None]
        totals = over_groups(
            [(group, self.squares[p]) for p, group in shared], lambda group, x: group.all_reduce_sum(x)
        )
        whole.update(zip((p for p, _ in shared), totals, strict=True))
        sums = torch.stack([whole[parameter] for parameter in unit])
        if self._max_norm:
            known = self.norms.amin()
            norms = torch.maximum(sums.sqrt().float(), torch.where(known.isinf(), 0.0, known))
            for gradient, divisor in zip(gradients, clip_divisor(norms, self._max_norm).unbind(), strict=True):
                gradient.div_(divisor)
        skips = self._found_inf | ~(sums <= LARGEST_SQUARES)
        self._optimizer.step_only(unit, found_inf=skips.float())
        for parameter in unit:
            parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)
