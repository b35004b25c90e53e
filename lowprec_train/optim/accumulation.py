"""Gradient accumulation over the micro-batches of a step in quantised form instead of FP32.

    held = encode(decode(held) + gradient),   once a micro-batch; the gradient is freed,   update(decode(held))

A `StateCodec` stores the sums: BF16, or E4M3, E5M2 and FP16 with one power-of-two scale for this rank's shard of a
matrix. With rounding to nearest, a gradient below half a unit of its sum is lost; with stochastic rounding, sums are
correct on average. Vectors are summed in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.ops.codecs import StateCodec, as_matrix
from lowprec_train.ops.updates import GRADIENT_STREAM, seeds
from lowprec_train.optim.gradient_hooks import after_gradient
from lowprec_train.optim.shard import Shard, local

STORED = ("none", "tensor")  # scalings that need no groups within a row


def check(codec: StateCodec) -> StateCodec:
    """Return `codec` if it can store sums of gradients. Raises ValueError otherwise."""
    if codec.scaling not in STORED:
        raise ValueError(
            f"optim.grad_accumulation={codec}: sums of gradients are stored as BF16, or scaled E4M3, E5M2 or FP16"
        )
    return codec


class GradientSum:
    """Sum of the gradients of one matrix. place: index of the parameter in the model. origin: of a shard, row and
    column of its first element in the whole matrix.
    """

    def __init__(self, codec: StateCodec, *, seed: int, place: int, origin: tuple[int, int] = (0, 0)) -> None:
        self._codec, self._seed = codec, seed
        self._place, self._origin = torch.tensor([place]), torch.tensor(origin)
        self._parts: dict[str, Tensor] = {}

    def add(self, gradient: Tensor, number: Tensor | None) -> None:
        """Add a gradient, FP32 or BF16. number: index of the micro-batch in the run, int64 [1] on its device, which
        selects the random draws; None for a codec without draws.
        """
        total = self._total(gradient)
        seed = origin = None
        if self._codec.stochastic:
            assert number is not None
            self._place, origin = self._place.to(total.device), self._origin.to(total.device)
            self._origin = origin
            seed = seeds(self._seed, self._place, number, stream=GRADIENT_STREAM)[0]
        self._parts = self._codec.encode(total, seed=seed, origin=origin)

    def value(self) -> Tensor:
        """Return the sum so far, FP32 [n, k]."""
        return self._codec.decode(self._parts)

    def take(self, gradient: Tensor | None = None) -> Tensor:
        """Return the sum plus one more gradient, without rounding, in FP32; clear the stored sum."""
        total = self.value() if gradient is None else self._total(gradient).view(gradient.shape)
        self._parts = {}
        return total

    @property
    def empty(self) -> bool:
        return not self._parts

    def _total(self, gradient: Tensor) -> Tensor:
        matrix = as_matrix(gradient).float()
        return matrix if self.empty else self.value() + matrix


class GradientSums:
    """Sums of the gradients of `parameters`: matrices whose gradients are already reduced over the ranks.

    in_backward: the last gradient of a step is added without rounding and the sum is left in `.grad`, for an update in
    the backward pass.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[int, nn.Parameter]],
        codec: StateCodec,
        *,
        seed: int,
        shards: Mapping[nn.Parameter, Shard] | None = None,
        in_backward: bool = False,
    ) -> None:
        self._in_backward, self._last = in_backward, False
        self._number: Tensor | None = None
        self._squares: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[nn.Parameter, GradientSum] = {}
        for place, parameter in parameters:
            origin = shards[parameter].origin if shards and parameter in shards else (0, 0)
            self._sums[parameter] = GradientSum(codec, seed=seed, place=place, origin=origin)
            after_gradient(parameter, self._complete)

    def begin(self, number: Tensor | None, *, last: bool) -> None:
        """Call before the backward pass of a micro-batch. number: as in `GradientSum.add`. last: whether it is the last
        of its step.
        """
        self._number, self._last = number, last
        self._squares.clear()

    @property
    def squares(self) -> dict[nn.Parameter, Tensor]:
        """Sum of squares of each sum that `gradients` will yield, 0-dim FP64. Those of matrices with a gradient in the
        last micro-batch were computed with it.
        """
        missing = {p: held for p, held in self._sums.items() if not held.empty and p not in self._squares}
        return self._squares | {p: _squares(held) for p, held in missing.items()}

    def gradients(self) -> Iterable[nn.Parameter]:
        """Yield each parameter with its sum as `.grad`, which is freed before the next one."""
        for parameter, held in self._sums.items():
            if not held.empty:
                _give(parameter, held.take().view(local(parameter).shape))
                yield parameter
                parameter.grad = None

    @torch.no_grad()
    def _complete(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        held, gradient = self._sums[parameter], local(parameter.grad)
        if self._last and self._in_backward:
            if not held.empty:
                _give(parameter, held.take(gradient))
            return
        parameter.grad = None
        held.add(gradient, self._number)
        if self._last:
            self._squares[parameter] = _squares(held)


def _squares(held: GradientSum) -> Tensor:
    return torch.ops.lowprec.sum_squares([held.value()])[0]


def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
    if isinstance(parameter, DTensor):
        here = (parameter.device_mesh, parameter.placements)
        parameter.grad = DTensor.from_local(
            gradient, *here, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    else:
        parameter.grad = gradient
