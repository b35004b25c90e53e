"""FP8-LM's reduction (arXiv 2310.18313, section 3.1): one scale for all ranks, the sum itself in FP8.

    A     = max over ranks of max |g_i|                  per parameter; NaN counts as infinity
    s     = mu * 2^floor(log2(448 / A))                  = mu * min over ranks of the just-in-time scales 448 / amax_i
    q_i   = E4M3(s * g_i)                                never saturates, since mu <= 1
    q     = E4M3(... E4M3(E4M3(q_0 + q_1) + q_2) ...)    what a ring of FP8 additions leaves; saturates at 448
    sum_i g_i ~ q / s                                    FP8-LM divides by N s: the average

mu is head-room against saturation of the sum. (Where the paper multiplies g_i by mu before a just-in-time scale is
taken, mu would cancel; it only means something after the shared scale.) With mu = 1/N nothing can saturate; with
MS-AMP's 1/sqrt(N) gradients that agree across ranks do. `MuSchedule` follows the share of codes at the maximum:

    mu <- mu / 2 if share > 1e-5 else mu * 2^(1/1000),    1/N <= mu <= 1

This is the ablation's codec: the error is two to three times that of a sum in FP32 (block_scaled.py), as the sum is
rounded N - 1 times on a grid that all ranks share. Codes are summed by the receiver, in rank order, after an
all-to-all: the arithmetic of a network that adds in FP8, on any back end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.comm.grad_codec import even
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group, sum_in_order
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, Format
from lowprec_train.ops.reference import divide, tile_scale, to_float
from lowprec_train.ops.rounding import encode

SATURATED_SHARE = 1e-5  # arXiv 2310.18313, section 3.1: 0.001 %
STEPS_TO_DOUBLE = 1000  # the same


@dataclass(frozen=True)
class SharedScaleCodec:
    """FP8-LM's `GradCodec`: coded ranges as FP8 codes under one scale a parameter, the others in BF16 with FP32 sums.

    format: of codes and of their sum.
    every_addition: round the partial sum after every addition, as a ring does; False rounds the FP32 sum of all codes
    once, which is what a switch that adds in FP32 leaves.

    Raises ValueError for another format.
    """

    format: Format = E4M3
    every_addition: bool = True

    block, exact, shares_scales = 1, False, True

    def __post_init__(self) -> None:
        if self.format not in (E4M3, E5M2):
            raise ValueError(f"a shared scale is for E4M3 or E5M2 codes, not {self.format}")

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        return layout

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Never: codes of a sum are gathered without another rounding."""
        return False

    def row_bytes(self, layout: FlatLayout) -> int:
        """The scales travel as one FP32 maximum per parameter beside it."""
        return even(layout.coded_size + self._plain_bytes(layout))

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> Tensor:
        """s of each range, FP32 [ranges]: NaN where an element of any rank is not finite, mu where all are 0."""
        assert mu is not None
        amax = torch.stack([piece.abs().amax().float() for piece in layout.pieces(rows)])
        scale, _ = tile_scale(group.all_reduce_max(amax), self.format, "POW2", 1.0, 0)
        return divide(mu.expand_as(scale), scale)

    def encode(
        self, parts: Sequence[Tensor], rows: int, layout: FlatLayout, scales: Tensor | None = None, *, inner: int = 1
    ) -> Tensor:
        """Codes of a decoded sum are the sum's own: s and its reciprocal cost less than half a step between codes."""
        assert scales is not None and inner == 1
        plain, codes = [], []
        for each, part, s in zip(layout.ranges, parts, scales.unbind(), strict=True):
            x = _in_rows(part, rows, each.size)
            if each.coded:
                codes.append(encode(x.float() * s, self.format).view(torch.uint8))
            else:
                plain.append(x.to(BF16.carrier).contiguous().view(torch.uint8))
        wire = torch.cat(plain + codes, dim=1)
        return F.pad(wire, (0, self.row_bytes(layout) - wire.shape[1]))

    def decode(
        self,
        wire: Tensor,
        parts: Sequence[Tensor],
        layout: FlatLayout,
        scales: Tensor | None = None,
        *,
        senders: int = 1,
        inner: int = 1,
    ) -> Tensor:
        """Sums of codes, of several senders, are codes themselves."""
        assert scales is not None and inner == 1
        sent = wire.unflatten(0, (senders, -1))
        plain_bytes = self._plain_bytes(layout)
        plain = sum_in_order(sent[..., :plain_bytes].contiguous().view(BF16.carrier).float().unbind())
        summed, at_maximum = self._add(sent[..., plain_bytes : plain_bytes + layout.coded_size])
        starts = {True: 0, False: 0}
        for each, part, s in zip(layout.ranges, parts, scales.unbind(), strict=True):
            start, source = starts[each.coded], summed if each.coded else plain
            starts[each.coded] = end = start + each.size
            rows = to_float(source[:, start:end])
            rows = rows * divide(torch.ones_like(s), s) if each.coded else rows
            part.copy_(rows.reshape(-1)[: part.numel()].view_as(part))
        return at_maximum

    def _add(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes [senders, rows, coded_size] added in order, as codes; how many an addition left at the maximum."""
        codes = sent.contiguous().view(self.format.carrier)
        total, at_maximum = to_float(codes[0]), torch.zeros(codes.shape[1:], dtype=torch.bool, device=codes.device)
        for code in codes[1:].unbind():
            total = total + to_float(code)
            if self.every_addition:
                total = to_float(encode(total, self.format))
                at_maximum |= total.abs() == self.format.max
        summed = encode(total, self.format)
        if not self.every_addition:
            at_maximum = to_float(summed).abs() == self.format.max
        return summed, at_maximum.sum()

    def _plain_bytes(self, layout: FlatLayout) -> int:
        return BF16.carrier.itemsize * (layout.size - layout.coded_size)

    def __str__(self) -> str:
        return f"{self.format.name}, one scale"


def _in_rows(part: Tensor, rows: int, size: int) -> Tensor:
    """[rows, size]; what a 1-D part lacks is zeros."""
    return part if part.dim() == 2 else F.pad(part, (0, rows * size - part.numel())).view(rows, size)


class MuSchedule:
    """FP8-LM's head-room mu in [1/ranks, 1], moved by the share of codes at the maximum, without reading the device.

    mu = 2^(level / 1000) with an integer level: a thousand clean steps double it exactly, a halving is 1000 levels
    down, and the ends are exact. It starts at 1/ranks, where nothing can saturate.

    Raises ValueError for fewer than one rank.
    """

    def __init__(self, ranks: int, device: torch.device | str = "cpu") -> None:
        if ranks < 1:
            raise ValueError(f"a reduction has at least one rank, not {ranks}")
        self.ranks = ranks
        self.lowest = -math.ceil(STEPS_TO_DOUBLE * math.log2(ranks))
        self.level = torch.full((), self.lowest, dtype=torch.int64, device=device)

    @property
    def mu(self) -> Tensor:
        """0-dim FP32. The power is taken in FP64 and rounded."""
        return torch.exp2(self.level.double() / STEPS_TO_DOUBLE).float().clamp(1.0 / self.ranks, 1.0)

    def update(self, share: Tensor) -> None:
        """Move by one step. share: 0-dim float, of all codes of all ranks, the same on every rank."""
        moved = torch.where(share > SATURATED_SHARE, self.level - STEPS_TO_DOUBLE, self.level + 1)
        self.level.copy_(moved.clamp(self.lowest, 0))

    def state_dict(self) -> dict[str, Any]:
        """The level, a 0-dim int64 tensor."""
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, on any device; within this run's bounds when the number of ranks has changed."""
        self.level.copy_(state["level"].clamp(self.lowest, 0))
