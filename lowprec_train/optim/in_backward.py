"""Updates in the backward pass: a parameter is updated when its gradient is complete, and the gradient is freed (LOMO,
arXiv 2306.09782, for any rule and codecs).

    backward of a layer -> its gradients -> the optimizer's step of these parameters -> no gradients

The norm of all gradients is not known during the pass, so gradients are not clipped. A step with a non-finite loss
changes nothing. If a gradient is not finite, or too large to square, its parameter is not updated and all others are:
the ranks with shards of it first all-reduce their sums of squares, one number each, so that either all of them update
it or none. Otherwise the bits are those of a step after the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.optim.shard import local

LARGEST_SQUARES = 1e38  # of a gradient whose square FP32 holds


class UpdatesInBackward:
    """Updates each of `parameters` when its gradient is complete; `optimizer.step` updates the others.

    squares: sum of squares of each used gradient on this rank, 0-dim FP64, until the next `begin`.
    """

    def __init__(self, optimizer: CodedOptimizer, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizer, self._found_inf = optimizer, torch.zeros(())
        self._active = False
        self.squares: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def begin(self, loss: Tensor | None) -> None:
        """Call before a backward pass. loss: of the step, 0-dim; None if the micro-batch is not the last of its step,
        so that its gradients are accumulated.
        """
        self._active = loss is not None
        self.squares.clear()
        if loss is not None:
            self._found_inf = ~loss.isfinite()

    @torch.no_grad()
    def _complete(self, parameter: Tensor) -> None:
        if not self._active or parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        squares = torch.ops.lowprec.sum_squares([local(parameter.grad).contiguous()])[0]
        group = self._optimizer.group_of(parameter)
        whole = squares if group is None else group.all_reduce_sum(squares)
        skip = self._found_inf | ~(whole <= LARGEST_SQUARES)
        self._optimizer.step_only(parameter, found_inf=skip.float())
        self.squares[parameter] = squares
        parameter.grad = None
