"""AdamW's step on one coded tensor: decoded, updated in FP32, encoded, written unless the step is skipped.

What a piece cannot know by itself comes as a `Whole`. An empty piece encodes a row of zeros in place of its own, of
which nothing is kept but what belongs to the whole tensor: its scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lowprec_train.ops.updates import Constants, update, write
from lowprec_train.optim.master import FP32Master
from lowprec_train.optim.moments import Decay, Parts
from lowprec_train.optim.slots import Held, Slot, flat, matrix, parts_of

Observer = Callable[[nn.Parameter, str, Tensor, Tensor, Tensor], None]
"""Told of everything that is rounded: parameter, "exp_avg" | "exp_avg_sq" | "master", its value before the step, the
new one, the new one as it was stored; FP32. A step that is skipped is reported as if it were taken."""

Values = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Numbers of the tensor that a piece is a part of; none where they are not needed, or where the piece is all.

    rms: of its update, where that is clipped, 0-dim FP32. amax: largest magnitudes of what has one scale, FP32 [1, 1]
    by name.
    """

    rms: Tensor | None = None
    amax: Mapping[str, Tensor] = field(default_factory=dict)


def start(slot: Slot, weights: Tensor, seed: Tensor | None, whole: Whole) -> tuple[Tensor, Parts]:
    """What the parameter becomes, and the state: zero moments and the first weights. weights: FP32, of the part."""
    w = matrix(weights)
    new = {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w), "master": w}
    value, coded = _encode(slot, new, seed, whole, None)
    return value.view(weights.shape), {key: tensor.clone() for key, tensor in coded.items()}


def step_one(
    held: Held,
    constants: Constants,
    whole: Whole,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    observer: Observer | None,
    *,
    clip: bool,
) -> None:
    """Update one tensor and its state in place."""
    old, new = advance(held, constants, grad_scale, clip=clip, rms=whole.rms)
    decay = Decay(old=old["exp_avg"], beta=constants.betas[0])
    value, coded = _encode(held.slot, new, constants.seed, whole, decay)
    if observer is not None and not held.empty:
        _report(observer, held, old, new, value, coded)
    skip = None if found_inf is None else found_inf == 1.0
    for key, tensor in coded.items():
        write(held.state[key], tensor, skip)
    write(held.parameter, value.view(held.parameter.shape).to(held.parameter.dtype), skip)
    write(held.state["step"], held.state["step"] + 1.0, skip)


def advance(
    held: Held, constants: Constants, grad_scale: Tensor | None, *, clip: bool, rms: Tensor | None = None
) -> tuple[Values, Values]:
    """Moments and weights before and after the update, FP32 [n, k], before anything is rounded."""
    slot, state = held.slot, held.state
    old = {name: slot.decode(name, state) for name, _ in slot.named}
    old["master"] = slot.master.decode(matrix(held.parameter), parts_of(state, "master"))
    return old, update(old, held.scaled_gradient(grad_scale), constants, clip=clip, rms=rms)


def _encode(slot: Slot, new: Values, seed: Tensor | None, whole: Whole, decay: Decay | None) -> tuple[Tensor, Parts]:
    """The parameter's new value, and its state by names."""
    empty, shape = new["master"].shape[0] == 0, new["master"].shape
    if empty:
        new, decay = {name: x.new_zeros((1, *shape[1:])) for name, x in new.items()}, None
    coded: Parts = {}
    for name, codec in slot.named:
        of = decay if name == "exp_avg" else None
        coded |= flat(name, codec.encode(new[name], amax=whole.amax.get(name), segments=slot.segments, decay=of))
    value, parts = slot.master.encode(new["master"], seed, slot.origin, amax=whole.amax.get("master"))
    coded |= flat("master", parts)
    if empty:
        along = slot.along(tuple(shape))
        coded = {key: tensor[:0] if key in along else tensor for key, tensor in coded.items()}
        value = value[:0]
    return value, coded


def _report(observer: Observer, held: Held, old: Values, new: Values, value: Tensor, coded: Parts) -> None:
    slot = held.slot
    for name, codec in slot.named:
        if not codec.exact:
            observer(held.owner, name, old[name], new[name], slot.decode(name, coded))
    if not isinstance(slot.master, FP32Master):
        stored = slot.master.decode(value, parts_of(coded, "master"))
        observer(held.owner, "master", old["master"], new["master"], stored)
