"""Updates in the backward pass: a parameter is updated when its gradient is complete, and the gradient is freed (LOMO,
arXiv 2306.09782, for any rule and codecs).

    backward of a layer -> its gradients -> the optimizer's step of these parameters -> no gradients

The norm of all gradients is not known during the pass. Clipping takes it from the step before, times what the gradient
of this matrix has grown since:

    gradient of p  /=  max(n max(|g_p| / n_p, 1) / max_norm, 1)

n and n_p are the norms of all gradients and of p's, in the last step or in the last but one, whichever is smaller: so a
single long gradient does not shorten those of the next step. Where n_p is 0, max(n, |g_p|) is in place of the product.
If all gradients grow by one factor, this is clipping by their norm. The first step has no norms before it: it measures
its own and updates nothing. Parameters that are updated after the pass are clipped by the norm itself. All norms have
the same bits for any sharding of the same gradients. This form of clipping is ours; LOMO runs a second backward pass,
or bounds each element, and AdaGC (arXiv 2502.11034) clips each tensor by an average of its own norms.

A step with a non-finite loss changes nothing. If a gradient is not finite, or too large to square when it is clipped,
its parameter is not updated; the others of the pass are. The ranks with shards of a parameter first all-reduce their
sums of squares, so that either all of them update it or none: one collective for all parameters that are reduced
together. Without clipping, the bits are those of a step after the backward pass.
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
    the last of them is complete, with one collective for the sums of squares of all; if one of them has no gradient,
    after the pass. A parameter without a unit is updated alone.
    squares: sum of squares of each used gradient on this rank, 0-dim FP64, until the next `begin`.
    norms: of the gradients of the last two steps that were not skipped, of all and of each of `parameters`, FP32
    [2, 1 + p]; 0 before there are any. Part of a run's state.
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
        self.norms = torch.zeros(2, 1 + len(updated), device=updated[0].device if updated else None)
        self._known = self.norms[0]  # what this step clips by
        self._divisor = torch.ones_like(self._known[0])  # of its gradients that have not grown
        self._places = {parameter: place for place, parameter in enumerate(updated, start=1)}
        self._own: dict[nn.Parameter, Tensor] = {}  # norms of this step
        self._units: dict[Tensor, tuple[nn.Parameter, ...]] = {parameter: (parameter,) for parameter in updated}
        for unit in units:
            members = tuple(parameter for parameter in unit if parameter in self._units)
            self._units.update(dict.fromkeys(members, members))
        self._index = {
            unit: torch.tensor([self._places[parameter] for parameter in unit], device=self.norms.device)
            for unit in set(self._units.values())
        }
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
            self._own.clear()
            if self._max_norm:
                last, before = self.norms.unbind()
                self._known = torch.where(before[0] == 0, last, torch.minimum(last, before))
                self._divisor = clip_divisor(self._known[0], self._max_norm)
                self._found_inf |= self.measures

    @property
    def measures(self) -> Tensor:
        """Whether the step only measures its norm, because there is none to clip by; 0-dim."""
        return (self.norms[0, 0] == 0) & bool(self._max_norm)

    def end(self, norm: Tensor, taken: Tensor) -> None:
        """Call after a step. norm: of all its gradients, 0-dim FP32. taken: whether it was not skipped, 0-dim."""
        if not self._max_norm:
            return
        own = [self._own.get(parameter, self.norms[0, place]) for parameter, place in self._places.items()]
        now = torch.stack([norm, *own])
        self.norms.copy_(torch.where(taken, torch.stack((now, self.norms[0])), self.norms))

    def _complete(self, parameter: Tensor) -> None:
        """Update the unit of `parameter`, if all of its gradients are complete."""
        if not self._active or parameter.grad is None:
            return
        unit = self._units[parameter]
        self._completed.add(parameter)
        if self._completed.issuperset(unit):
            self._update(unit)

    @torch.no_grad()
    def _update(self, unit: tuple[nn.Parameter, ...]) -> None:
        """Update the parameters of a unit and free their gradients."""
        squares = torch.ops.lowprec.sum_squares([_gradient(parameter).contiguous() for parameter in unit])
        self.squares.update(zip(unit, squares.unbind(), strict=True))
        whole = {parameter: self.squares[parameter] for parameter in unit}
        shared = [(p, group) for p in unit if (group := self._optimizer.group_of(p)) is not None]
        totals = over_groups(
            [(group, self.squares[p]) for p, group in shared], lambda group, x: group.all_reduce_sum(x)
        )
        whole.update(zip((p for p, _ in shared), totals, strict=True))
        sums = torch.stack([whole[parameter] for parameter in unit])
        grad_scale = None
        if self._max_norm:
            sums, grad_scale = sums / self._clip(unit, sums.sqrt().float()).double().square(), self._divisor
        skips = self._found_inf | ~(sums <= LARGEST_SQUARES)
        self._optimizer.step_only(unit, grad_scale=grad_scale, found_inf=skips.float())
        for parameter in unit:
            parameter.grad = None

    def _clip(self, unit: tuple[nn.Parameter, ...], norms: Tensor) -> Tensor:
        """Divide gradients that have grown, so that `_divisor` does the rest. Return both divisors' product, FP32 [p].
        norms: of the gradients over all ranks, FP32 [p].
        """
        self._own.update(zip(unit, norms.unbind(), strict=True))
        known, of_all = self._known[self._index[unit]], self._known[0]
        grown = of_all * (norms / known).clamp(min=1.0)
        divisors = clip_divisor(torch.where(known == 0, torch.maximum(of_all, norms), grown), self._max_norm)
        for parameter, more in zip(unit, (divisors / self._divisor).unbind(), strict=True):
            _gradient(parameter).div_(more)
        return divisors


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)
