"""What pieces have to know of whole tensors before they can be stepped: the ranks' numbers, put together.

    RMS of a clipped update        sqrt(sum over all pieces of g'^2 / max(v'^, eps^2), by the number of elements)
    scale of what has one scale    from the largest magnitude, over all pieces, of the new moment or weight

The update is made once for its numbers and once more to be stored: nothing is kept between the sweeps but a few numbers
a tensor, and no more than one tensor's part is in FP32 at a time. All tensors whose pieces lie on the same ranks share
one collective a sweep. Sums are taken in FP64 (`ops.updates.wide_sum`), so that an RMS does not depend on the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_train.ops.updates import Constants, first_moment, second_moment, squared_updates
from lowprec_train.optim.coded import Whole, advance
from lowprec_train.optim.piece import over_holders
from lowprec_train.optim.slots import Held, Slot, matrix

STORED = ("exp_avg", "exp_avg_sq", "master")
Work = Sequence[tuple[Held, Constants]]


def before_start(slots: Sequence[tuple[Slot, Tensor]]) -> list[Whole]:
    """Of first weights: slots and their parts, FP32."""
    here = {}
    for place, (slot, part) in enumerate(slots):
        if slot.holders is not None and slot.master.one_scale:
            zero = torch.zeros((), device=part.device)
            first = {"exp_avg": zero, "exp_avg_sq": zero, "master": matrix(part)}
            here[place] = slot.holders, _maxima(first, slot, part.device)
    found = over_holders(here, lambda holders, x: holders.all_reduce_max(x))
    return [Whole(amax=_by_name(slot, found.get(place))) for place, (slot, _) in enumerate(slots)]


def before_step(work: Work, grad_scale: Tensor | None, *, clip: bool) -> list[Whole]:
    """Of the tensors of a step, before any of them is written."""
    rms = _rms(work, grad_scale) if clip else {}
    here = {}
    for place, (held, constants) in enumerate(work):
        if held.slot.holders is not None and held.slot.one_scale:
            new = _advanced(held, constants, grad_scale, clip, rms.get(place))
            here[place] = held.slot.holders, _maxima(new, held.slot, held.parameter.device)
    found = over_holders(here, lambda holders, x: holders.all_reduce_max(x))
    return [
        Whole(rms=rms.get(place), amax=_by_name(held.slot, found.get(place))) for place, (held, _) in enumerate(work)
    ]


def _rms(work: Work, grad_scale: Tensor | None) -> dict[int, Tensor]:
    here = {}
    for place, (held, constants) in enumerate(work):
        if held.slot.holders is not None:
            gradient = held.scaled_gradient(grad_scale)
            v = second_moment(held.slot.decode("exp_avg_sq", held.state), gradient, constants.betas)
            squares = squared_updates(gradient, v, constants.corrections[1], constants.eps)
            here[place] = held.slot.holders, squares
    totals = over_holders(here, lambda holders, x: holders.all_reduce_sum(x))
    numbers = {place: math.prod(held.slot.piece.shape) for place, (held, _) in enumerate(work) if held.slot.piece}
    return {place: (total / numbers[place]).sqrt().float() for place, total in totals.items()}


def _advanced(
    held: Held, constants: Constants, grad_scale: Tensor | None, clip: bool, rms: Tensor | None
) -> dict[str, Tensor]:
    """The new values of what has one scale; weights are not computed where theirs is not asked for."""
    if held.slot.master.one_scale:
        return advance(held, constants, grad_scale, clip=clip, rms=rms)[1]
    gradient, names = held.scaled_gradient(grad_scale), held.slot.one_scale
    rules = {"exp_avg": first_moment, "exp_avg_sq": second_moment}
    return {name: rules[name](held.slot.decode(name, held.state), gradient, constants.betas) for name in names}


def _maxima(values: dict[str, Tensor], slot: Slot, device: torch.device) -> Tensor:
    """Largest magnitudes on this rank, FP32 [3]: zero for what is not asked for, and where the piece is empty."""
    zero = torch.zeros((), device=device)
    asked = {name: x for name, x in values.items() if name in slot.one_scale and x.numel()}
    return torch.stack([asked[name].abs().amax() if name in asked else zero for name in STORED])


def _by_name(slot: Slot, maxima: Tensor | None) -> dict[str, Tensor]:
    if maxima is None:
        return {}
    return {name: each.view(1, 1) for name, each in zip(STORED, maxima.unbind(), strict=True) if name in slot.one_scale}
