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

This is the ablation's payload: the error is two to three times that of a sum in FP32 (payload.py), as the sum is
rounded N - 1 times on a grid that all ranks share. Codes are summed by the receiver, in rank order, after an
all-to-all: the arithmetic of a network that adds in FP8, on any back end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowprec_train.comm.layout import Layout
from lowprec_train.comm.payload import decode_plain, encode_plain, even, join
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, Format
from lowprec_train.ops.reference import divide, encode, tile_scale, to_float

SATURATED_SHARE = 1e-5  # arXiv 2310.18313, section 3.1: 0.001 %
STEPS_TO_DOUBLE = 1000  # the same


@dataclass(frozen=True)
class SharedScale:
    """FP8-LM's payload: coded spans as FP8 codes under one scale per parameter, the others in BF16 with FP32 sums.

    format: of codes and of their sum.
    every_addition: round the partial sum after every addition, as a ring does; False rounds the FP32 sum of all codes
    once, which is what a switch that adds in FP32 leaves.

    Raises ValueError for another format.
    """

    format: Format = E4M3
    every_addition: bool = True

    def __post_init__(self) -> None:
        if self.format not in (E4M3, E5M2):
            raise ValueError(f"a shared scale is for E4M3 or E5M2 codes, not {self.format}")

    def row_bytes(self, layout: Layout) -> int:
        """Bytes on the wire of one row; the scales travel as one FP32 maximum per parameter beside it."""
        return even(layout.coded_size + self._plain_bytes(layout))

    def amax(self, rows: Tensor, layout: Layout) -> Tensor:
        """Largest magnitude of each span over rows [n, size], FP32 [spans], NaN as infinity: a maximum over ranks may
        drop a NaN but no infinity."""
        largest = torch.stack([piece.abs().amax().float() for piece in layout.pieces(rows)])
        return largest.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def multiplier(self, amax: Tensor, mu: Tensor) -> Tensor:
        """s of each span [spans] from the maxima over all ranks: NaN where they are infinite, mu where they are 0."""
        scale, _ = tile_scale(amax, self.format.name, "POW2", 1.0, 0)
        return divide(mu.expand_as(scale), scale)

    def encode(self, rows: Tensor, layout: Layout, multiplier: Tensor) -> Tensor:
        """Gradients [n, size] as bytes, uint8 [n, row_bytes]."""
        parts = []
        if layout.coded_size < layout.size:
            parts.append(encode_plain(layout.columns(rows, False, 1), BF16))
        for span, piece, s in zip(layout.spans, layout.pieces(rows), multiplier.unbind()):
            if span.coded:
                parts.append(encode(piece.float() * s, self.format.name, None).view(torch.uint8))
        return join(parts)

    def add(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of the rows' contributions: codes [coded_size], FP32 sums of the other spans, and how many codes an
        addition left at the maximum (0-dim int64)."""
        codes, plain = self._open(wire, layout)
        total, at_maximum = to_float(codes[0]), torch.zeros(codes.shape[1:], dtype=torch.bool, device=wire.device)
        for code in codes[1:].unbind():
            total = total + to_float(code)
            if self.every_addition:
                total = to_float(encode(total, self.format.name, None))
                at_maximum |= total.abs() == self.format.max
        summed = encode(total, self.format.name, None)
        if not self.every_addition:
            at_maximum = to_float(summed).abs() == self.format.max
        return summed, _sum_in_order(plain), at_maximum.sum()

    def encode_sum(self, codes: Tensor, plain: Tensor) -> Tensor:
        """What `add` left as bytes [1, row_bytes]; the codes go as they are."""
        parts = [encode_plain(plain[None], BF16)] if len(plain) else []
        return join([*parts, codes.view(torch.uint8)[None]])

    def decode(self, wire: Tensor, layout: Layout, multiplier: Tensor) -> Tensor:
        """Bytes [n, row_bytes] as FP32 [n, size]."""
        return self.scale_back(*self._open(wire, layout), layout, multiplier)

    def scale_back(self, codes: Tensor, plain: Tensor, layout: Layout, multiplier: Tensor) -> Tensor:
        """Codes [n, coded_size] / s beside the plain spans: FP32 [n, size]."""
        scale = divide(torch.ones_like(multiplier), multiplier)
        each = zip(layout.spans, scale.unbind())
        spread = torch.cat([s.expand(span.size) for span, s in each if span.coded] or [scale[:0]])
        return layout.merge(to_float(codes) * spread, plain, 1)

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Codes [n, coded_size] and plain elements in FP32."""
        start = self._plain_bytes(layout)
        codes = wire[:, start : start + layout.coded_size]
        return codes.view(self.format.carrier), decode_plain(wire[:, :start], BF16)

    def _plain_bytes(self, layout: Layout) -> int:
        return BF16.carrier.itemsize * (layout.size - layout.coded_size)


def _sum_in_order(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:].unbind():
        total += row
    return total


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
