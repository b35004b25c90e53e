"""Where one rank's part of a parameter lies in the whole, and who holds the rest, as data.

    shape (6, 8), cut into rows over 2 and columns over 2: first (3, 4), local (3, 4) is the last of four pieces

A scale of the whole tensor needs the largest magnitude over all pieces, a mean needs their sums, a draw the place of
its element in the whole: with these an optimizer that holds one piece computes the bits of one that holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowprec_train.group import Group


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where this rank's part of a parameter lies in the whole.

    shape: of the whole. first: index there of the part's first element. local: shape of the part; dimension 0 may be
    empty on the last ranks. holders: of all the parts; None where this rank holds the whole.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    local: tuple[int, ...]
    holders: Group | None


def local(x: Tensor) -> Tensor:
    """What this rank has of x: the part of a DTensor, sharing its memory; anything else as it is."""
    part: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part.detach()


def over_holders(
    values: Mapping[int, tuple[Group, Tensor]], combine: Callable[[Group, Tensor], Tensor]
) -> dict[int, Tensor]:
    """Numbers of many tensors, each combined over the holders of its own: one call for all that share them.

    values: of one shape and dtype, by any key. combine: a verb of `Group` that takes them stacked.
    """
    together: dict[Group, list[int]] = {}
    for key, (holders, _) in values.items():
        together.setdefault(holders, []).append(key)
    combined: dict[int, Tensor] = {}
    for holders, keys in together.items():
        stacked = combine(holders, torch.stack([values[key][1] for key in keys]))
        combined |= dict(zip(keys, stacked.unbind(), strict=True))
    return combined
