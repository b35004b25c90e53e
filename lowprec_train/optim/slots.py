"""How a parameter is stored between two steps: a codec for each moment, one for the weights, and the names of it all.

A parameter's state is flat: `exp_avg` holds codes, `exp_avg.scale` what belongs to them, `master` is there where the
parameter is not the master itself. The same storage in the words of the fused op is a `Wording` (`ops.updates`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowprec_train.numerics.formats import parse_format
from lowprec_train.optim.master import BF16Master, FP16Master, FP32Master, Master
from lowprec_train.optim.moments import Codec, Expanded, Parts, Plain, Scaled

FP32_MOMENTS = (Plain("FP32"), Plain("FP32"))
FP32_MASTER = FP32Master()
PARTS = ("codes", "scale", "exponent", "center")
KINDS = {Plain: "", Scaled: " scaled", Expanded: " expanded"}
MASTERS = {
    FP32_MASTER: "FP32",
    FP16Master(True): "FP16 scaled, stochastic",
    FP16Master(False): "FP16 scaled",
    BF16Master(): "BF16, stochastic",
}


@dataclass(frozen=True)
class Slot:
    """How one parameter is stored, and its index among all (0-dim int64, on its device)."""

    index: Tensor
    moments: tuple[Codec, Codec]
    master: Master

    @property
    def plain(self) -> bool:
        """FP32 throughout."""
        return all(codec.exact for codec in self.moments) and isinstance(self.master, FP32Master)

    @property
    def named(self) -> tuple[tuple[str, Codec], tuple[str, Codec]]:
        """The moments by their names in the state."""
        return ("exp_avg", self.moments[0]), ("exp_avg_sq", self.moments[1])


@dataclass(frozen=True)
class Held:
    """What one step has of a parameter: plain tensors of one shape, and the state."""

    owner: nn.Parameter
    slot: Slot
    parameter: Tensor
    gradient: Tensor
    state: Parts


@dataclass(frozen=True)
class Wording:
    """How a slot is stored, in the words of the fused op."""

    first: str
    second: str
    master: str
    group: int


def wording(slot: Slot) -> Wording | None:
    """None where the fused op knows no such codec, or where two moments differ in their groups."""
    names, groups = [], set()
    for codec in slot.moments:
        if not isinstance(codec, Plain | Scaled | Expanded):
            return None
        names.append(parse_format(codec.format).name + KINDS[type(codec)])
        groups |= {codec.group} if isinstance(codec, Expanded) else set()
    master = MASTERS.get(slot.master)
    if master is None or len(groups) > 1:
        return None
    return Wording(names[0], names[1], master, groups.pop() if groups else 1)


def matrix(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]; vectors stay what they are."""
    return x.flatten(end_dim=-2) if x.ndim > 2 else x


def flat(name: str, parts: Parts) -> Parts:
    """`codes` under the state's own name, the rest as `<name>.<part>`."""
    return {name if part == "codes" else f"{name}.{part}": value for part, value in parts.items()}


def parts_of(state: Parts, name: str) -> Parts:
    """The parts that `flat` named."""
    prefix = f"{name}."
    parts = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return parts | ({"codes": state[name]} if name in state else {})


def listed(states: list[Parts], name: str) -> list[Tensor]:
    """The parts of one name, state after state."""
    held = (parts_of(state, name) for state in states)
    return [parts[part] for parts in held for part in PARTS if part in parts]


def steps_after(states: list[Parts]) -> Tensor:
    """Numbers of the updates that are being made, FP32 [p]."""
    return torch.stack([state["step"] for state in states]) + 1.0
