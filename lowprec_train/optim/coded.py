"""AdamW's step on one coded tensor: decoded, updated in FP32, encoded, written unless the step is skipped."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lowprec_train.ops.updates import Constants, update, write
from lowprec_train.optim.master import FP32Master
from lowprec_train.optim.moments import Parts
from lowprec_train.optim.slots import Held, flat, matrix, parts_of

Observer = Callable[[nn.Parameter, str, Tensor, Tensor, Tensor], None]
"""Told of everything that is rounded: parameter, "exp_avg" | "exp_avg_sq" | "master", its value before the step, the
new one, the new one as it was stored; FP32. A step that is skipped is reported as if it were taken."""

Values = dict[str, Tensor]


def step_one(
    held: Held,
    constants: Constants,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    observer: Observer | None,
    *,
    clip: bool,
) -> None:
    """Update one tensor and its state in place."""
    old, new = advance(held, constants, grad_scale, clip=clip)
    coded: dict[str, Parts] = {name: codec.encode(new[name]) for name, codec in held.slot.named}
    value, coded["master"] = held.slot.master.encode(new["master"], constants.seed)
    if observer is not None:
        _report(observer, held, old, new, value, coded)
    skip = None if found_inf is None else found_inf == 1.0
    for name, parts in coded.items():
        for key, tensor in flat(name, parts).items():
            write(held.state[key], tensor, skip)
    write(held.parameter, value.view(held.parameter.shape), skip)
    write(held.state["step"], held.state["step"] + 1.0, skip)


def advance(held: Held, constants: Constants, grad_scale: Tensor | None, *, clip: bool) -> tuple[Values, Values]:
    """Moments and weights before and after the update, FP32 [n, k], before anything is rounded."""
    slot, state = held.slot, held.state
    gradient = matrix(held.gradient).float()
    gradient = gradient if grad_scale is None else gradient / grad_scale
    old = {name: codec.decode(parts_of(state, name)) for name, codec in slot.named}
    old["master"] = slot.master.decode(matrix(held.parameter), parts_of(state, "master"))
    return old, update(old, gradient, constants, clip=clip)


def _report(observer: Observer, held: Held, old: Values, new: Values, value: Tensor, coded: dict[str, Parts]) -> None:
    slot = held.slot
    for name, codec in slot.named:
        if not codec.exact:
            observer(held.owner, name, old[name], new[name], codec.decode(coded[name]))
    if not isinstance(slot.master, FP32Master):
        observer(held.owner, "master", old["master"], new["master"], slot.master.decode(value, coded["master"]))
