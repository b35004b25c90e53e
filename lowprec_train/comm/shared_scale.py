"""FP8-LM's reduction (arXiv 2310.18313, section 3.1): one scale for all ranks, the sum itself in FP8.

    A     = max over ranks of max |g_i|                  per parameter; NaN counts as infinity
    s     = mu * 2^floor(log2(448 / A))                  = mu * min over ranks of the just-in-time scales 448 / amax_i
    q_i   = E4M3(s * g_i)                                never saturates, since mu <= 1
    q     = E4M3(... E4M3(E4M3(q_0 + q_1) + q_2) ...)    the result of a ring of FP8 additions; saturates at 448
    sum_i g_i ~ q / s                                    FP8-LM divides by N s: the average

mu is head-room against saturation of the sum. (In the paper's formula, which multiplies g_i by mu before a just-in-time
scale is computed, mu would cancel; it has an effect only after the shared scale.) With mu = 1/N nothing can saturate;
with MS-AMP's 1/sqrt(N) gradients that agree across ranks do. `MuSchedule` follows the share of codes at the maximum:

    mu <- mu / 2 if share > 1e-5 else mu * 2^(1/1000),    1/N <= mu <= 1

This codec is for the ablation: its error is two to three times that of a sum in FP32 (block_scaled.py), because the sum
is rounded N - 1 times on a grid that all ranks share. The receiver sums the codes in rank order after an all-to-all:
this is the arithmetic of a network that adds in FP8, on any back end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group
from lowprec_train.numerics.formats import E4M3, E5M2, Format
from lowprec_train.ops.schema import row_bytes_by

SATURATED_SHARE = 1e-5  # arXiv 2310.18313, section 3.1: 0.001 %
STEPS_TO_DOUBLE = 1000  # the same


@dataclass(frozen=True)
class SharedScaleCodec:
    """FP8-LM's `GradCodec`: coded ranges as FP8 codes with one scale per parameter, others in BF16 with FP32 sums.

    format: of codes and of their sum.
    every_addition: round the partial sum after every addition, as a ring does; False: round the FP32 sum of all codes
    once, as a switch that adds in FP32 does.

    Raises ValueError for another format.
    """

    format: Format = E4M3
    every_addition: bool = True

    block, exact, sends_bf16, bf16_suffices, shares_scales = 1, False, False, False, True

    def __post_init__(self) -> None:
        if self.format not in (E4M3, E5M2):
            raise ValueError(f"a shared scale is for E4M3 or E5M2 codes, not {self.format}")

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        return layout

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Return False: codes of a sum are gathered without another rounding."""
        return False

    def row_bytes(self, layout: FlatLayout) -> int:
        """Return the bytes of a row. Scales are sent separately, as one FP32 maximum per parameter."""
        return row_bytes_by(*layout.table(), self.format.name)

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> Tensor:
        """Return s of each range, FP32 [ranges]: NaN if an element of any rank is not finite, mu if all are 0."""
        assert mu is not None
        amax = group.all_reduce_max(_amax(rows, layout))
        quantize = torch.ops.lowprec.quantize  # each maximum is a tile: one launch
        _, scale = quantize(amax[:, None], self.format.name, [1, 1], "POW2", 1.0, 0, "nearest", None, None)
        return mu / scale[:, 0]

    def sends_unchanged(self, parts: Sequence[Tensor], rows: int, layout: FlatLayout) -> bool:
        return False

    def encode(
        self,
        parts: Sequence[Tensor],
        rows: int,
        layout: FlatLayout,
        scales: Tensor | None = None,
        *,
        inner: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode. Codes of a decoded sum are the sum's codes: s and its reciprocal lose less than half a step."""
        assert scales is not None and inner == 1 and out is None
        encode = torch.ops.lowprec.encode_gradients_by
        return encode(parts, rows, *layout.table(), scales, self.format.name)

    def decode(
        self,
        wire: Tensor | Sequence[Tensor],
        parts: Sequence[Tensor],
        layout: FlatLayout,
        scales: Tensor | None = None,
        *,
        senders: int = 1,
        inner: int = 1,
        by_range: bool = False,
    ) -> Tensor:
        """Decode and sum. Sums of codes of several senders are codes themselves."""
        assert scales is not None and inner == 1 and not by_range and isinstance(wire, Tensor)
        decode, every = torch.ops.lowprec.decode_gradients_by, self.every_addition
        return decode(wire, parts, *layout.table(), scales, self.format.name, senders, every)

    def __str__(self) -> str:
        return f"{self.format.name}, one scale"


def _amax(rows: Tensor, layout: FlatLayout) -> Tensor:
    """Return the amax of each range of all rows, FP32 [ranges], NaN as infinity, in one pass over the buffer. A range
    is a whole number of lines of equal length.
    """
    line = math.gcd(*(each.size for each in layout.ranges))
    amax = torch.linalg.vector_norm(rows.view(len(rows), -1, line), torch.inf, dim=(0, 2))
    made = torch.zeros(len(layout.ranges), device=rows.device)
    return made.scatter_reduce_(
        0, _of_lines(layout, line, rows.device), amax.float().nan_to_num(torch.inf, torch.inf), "amax"
    )


@cache
def _of_lines(layout: FlatLayout, line: int, device: torch.device) -> Tensor:
    """Return the range of each line of a row, int64."""
    counts = [each.size // line for each in layout.ranges]
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)


class MuSchedule:
    """FP8-LM's head-room mu in [1/ranks, 1], moved by the share of codes at the maximum, without reading the device.

    mu = 2^(level / 1000) with an integer level: a thousand clean steps double it exactly, a halving subtracts 1000
    levels, and the bounds are exact. It starts at 1/ranks, where nothing can saturate.

    mu: 0-dim FP32, of the current level.

    Raises ValueError for fewer than one rank.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        if ranks < 1:
            raise ValueError(f"a reduction has at least one rank, not {ranks}")
        self.ranks = ranks
        self.lowest = -math.ceil(STEPS_TO_DOUBLE * math.log2(ranks))
        self.level = torch.full((), self.lowest, dtype=torch.int64, device=device)
        self._move_to(self.level)

    def update(self, share: Tensor) -> None:
        """Move once per step. share: 0-dim float, over all codes of all ranks, the same on every rank."""
        self._move_to(torch.where(share > SATURATED_SHARE, self.level - STEPS_TO_DOUBLE, self.level + 1))

    def _move_to(self, level: Tensor) -> None:
        """Set the level, and mu in FP64, rounded to FP32."""
        self.level.copy_(level.clamp(self.lowest, 0))
        self.mu = torch.exp2(self.level.double() / STEPS_TO_DOUBLE).float().clamp(1.0 / self.ranks, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the level, a 0-dim int64 tensor."""
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, on any device; within this run's bounds if the number of ranks has changed."""
        self._move_to(state["level"].to(self.level.device))
