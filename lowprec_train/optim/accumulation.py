"""Sums of gradients between the micro-batches of a step, stored in codes instead of FP32.

    held = encode(decode(held) + gradient),   once a micro-batch; the gradient is freed,   update(decode(held))

`StateCodec` stores them: BF16, or E4M3, E5M2 and FP16 under one power of two for this rank's part of a matrix. To
nearest, A roundings of half a unit each stall where a gradient is below half a unit of its sum; stochastic roundings
keep sums right on average. Vectors are summed in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.ops.codecs import StateCodec, as_matrix
from lowprec_train.ops.updates import GRADIENT_STREAM, seeds
from lowprec_train.optim.shard import Shard, local

STORED = ("none", "tensor")  # scalings that need no groups within a row


def check(codec: StateCodec) -> StateCodec:
    """`codec` where it can store sums of gradients. Raises ValueError."""
    if codec.scaling not in STORED:
        raise ValueError(f"sums of gradients are stored as BF16, or scaled E4M3, E5M2 or FP16, not as {codec}")
    return codec


class GradientSum:
    """The sum of one matrix's gradients. place: of the parameter in the model. origin: row and column of its first
    element, where it is a shard.
    """

    def __init__(self, codec: StateCodec, *, seed: int, place: int, origin: tuple[int, int] = (0, 0)) -> None:
        self._codec, self._seed, self._place, self._origin = codec, seed, place, origin
        self._parts: dict[str, Tensor] = {}

    def add(self, gradient: Tensor, number: int) -> None:
        """Add a gradient, FP32 or BF16. number: of the micro-batch in the run; draws differ from one to the next."""
        total = self._total(gradient)
        seed = origin = None
        if self._codec.stochastic:
            place, step = (torch.tensor([each], device=total.device) for each in (self._place, number))
            seed = seeds(self._seed, place, step, stream=GRADIENT_STREAM)[0]
            origin = torch.tensor(self._origin, device=total.device)
        self._parts = self._codec.encode(total, seed=seed, origin=origin)

    def value(self) -> Tensor:
        """The sum so far, FP32 [n, k]."""
        return self._codec.decode(self._parts)

    def take(self, gradient: Tensor | None = None) -> Tensor:
        """The sum with one more gradient that is not rounded, FP32 in its shape; nothing stays."""
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
    """The sums of `parameters`, matrices whose gradients are this rank's parts of sums over the ranks.

    in_backward: the last gradient of a step is not rounded but left with the sum in `.grad`, for who steps it there.
    squares: of each finished sum, 0-dim FP64, until the next step.
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
        self._in_backward, self._number, self._last = in_backward, 0, False
        self.squares: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[Tensor, GradientSum] = {}
        for place, parameter in parameters:
            origin = shards[parameter].origin if shards and parameter in shards else (0, 0)
            self._sums[parameter] = GradientSum(codec, seed=seed, place=place, origin=origin)
            parameter.register_post_accumulate_grad_hook(self._complete)

    def begin(self, number: int, *, last: bool) -> None:
        """Before the backward pass of a micro-batch. number: in the run. last: of its step."""
        self._number, self._last = number, last
        self.squares.clear()

    def gradients(self) -> Iterable[nn.Parameter]:
        """Each parameter in turn with its sum as `.grad`, which is freed when the next one is asked for."""
        for parameter, held in self._sums.items():
            if not held.empty:
                assert isinstance(parameter, nn.Parameter)
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
            self.squares[parameter] = torch.ops.lowprec.sum_squares([held.value()])[0]


def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
    if isinstance(parameter, DTensor):
        here = (parameter.device_mesh, parameter.placements)
        parameter.grad = DTensor.from_local(
            gradient, *here, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    else:
        parameter.grad = gradient
