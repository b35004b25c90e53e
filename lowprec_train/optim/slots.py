"""How a parameter is stored between two steps: a codec for each moment, one for the weights, and the names of it all.

A parameter's state is flat: `exp_avg` holds codes, `exp_avg.scale` what belongs to them, `master` is there where the
parameter is not the master itself. The same storage in the words of the fused op is a `Wording` (`ops.updates`).

A parameter may be a piece of a whole: its codes are those that the whole would have there. They need numbers of the
whole where a scale or a mean is one for all of it, and where they do not, no other rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.numerics.formats import parse_format
from lowprec_train.optim.master import BF16Master, FP16Master, FP32Master, Master
from lowprec_train.optim.moments import Codec, Expanded, Parts, Plain, Scaled, segments
from lowprec_train.optim.piece import Piece

T = TypeVar("T")

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
    """How one parameter is stored.

    index: among all, 0-dim int64 on its device. piece: where its part lies, None for a whole parameter. segments: of
    a row of the part. origin: global row and column of the part's first element, int64 [2]; None for a whole.
    """

    index: Tensor
    moments: tuple[Codec, Codec]
    master: Master
    segments: int
    piece: Piece | None = None
    origin: Tensor | None = None

    @property
    def holders(self) -> Group | None:
        """Who holds the other parts; None where there are none."""
        return None if self.piece is None else self.piece.holders

    @property
    def one_scale(self) -> tuple[str, ...]:
        """Names of what is stored under one scale a tensor."""
        master = ("master",) if self.master.one_scale else ()
        return tuple(name for name, codec in self.named if codec.one_scale) + master

    @property
    def placeless(self) -> bool:
        """Whether a part's codes follow from its numbers alone."""
        return self.holders is None or not (self.one_scale or self.master.stochastic)

    @property
    def plain(self) -> bool:
        """FP32 throughout."""
        return all(codec.exact for codec in self.moments) and isinstance(self.master, FP32Master)

    @property
    def named(self) -> tuple[tuple[str, Codec], tuple[str, Codec]]:
        """The moments by their names in the state."""
        return ("exp_avg", self.moments[0]), ("exp_avg_sq", self.moments[1])

    def decode(self, name: str, state: Parts) -> Tensor:
        """A moment, FP32 [n, k]."""
        return dict(self.named)[name].decode(parts_of(state, name), segments=self.segments)

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the state tensors that lie along a parameter of `shape` and are cut with it, by name."""
        stored = (*self.named, ("master", self.master))
        return {key: at for name, codec in stored for key, at in flat(name, codec.along(shape)).items()}


@dataclass(frozen=True)
class Held:
    """What one step has of a parameter: plain tensors of one shape, and the state."""

    owner: nn.Parameter
    slot: Slot
    parameter: Tensor
    gradient: Tensor
    state: Parts

    @property
    def empty(self) -> bool:
        """No element of the parameter lies here."""
        return self.parameter.numel() == 0

    def scaled_gradient(self, grad_scale: Tensor | None) -> Tensor:
        """g' [n, k], FP32."""
        gradient = matrix(self.gradient).float()
        return gradient if grad_scale is None else gradient / grad_scale


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


def slot(parameter: Tensor, index: int, moments: tuple[Codec, Codec], master: Master, piece: Piece | None) -> Slot:
    """The slot of a parameter, of which this rank has `parameter`.

    Raises ValueError for a piece that is not where its codecs can be cut.
    """
    columns = parameter.shape[-1] if parameter.ndim else 1
    place = torch.tensor(index, device=parameter.device)
    if piece is None or piece.holders is None:
        return Slot(place, moments, master, segments(columns), piece)
    if tuple(parameter.shape) != piece.local:
        raise ValueError(f"a parameter's part of shape {tuple(parameter.shape)} is said to have shape {piece.local}")
    origin = torch.tensor(_origin(piece), device=parameter.device)
    return Slot(place, moments, master, _segments(piece, (*moments, master)), piece, origin)


def _origin(piece: Piece) -> tuple[int, int]:
    """Row and column of the first element in the whole as a matrix."""
    row = 0
    for first, size in zip(piece.first[:-1], piece.shape[:-1], strict=True):
        row = row * size + first
    return row, piece.first[-1]


def _segments(piece: Piece, codecs: tuple[Codec | Master, ...]) -> int:
    """Segments of the part's rows."""
    columns, first, here = piece.shape[-1], piece.first[-1], piece.local[-1]
    unit = columns // segments(columns)
    for codec in codecs:
        if isinstance(codec, Expanded) and (first % unit or here % unit):
            raise ValueError(
                f"columns {first} to {first + here} of {columns} cannot be stored apart: groups of expanded moments "
                f"restart at multiples of {unit}"
            )
        if isinstance(codec, BF16Master | FP16Master) and codec.stochastic and first % 8:
            raise ValueError(f"column {first} of {columns} begins a part: stochastic masters draw 8 columns at a time")
    return max(1, here // unit)


def matrix(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]; vectors stay what they are."""
    return x.flatten(end_dim=-2) if x.ndim > 2 else x


def flat(name: str, parts: Mapping[str, T]) -> dict[str, T]:
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
