"""The wire format of one rank's gradient contribution: what a codec is, and what codecs share.

    g = sum_i decode(encode(g_i))        one contribution a rank, as bytes; the sum is the receiver's

Two codecs: blocks with scales of their own (`block_scaled`), one scale for all ranks (`shared_scale`). What is not
coded (vectors) travels in BF16 or FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group


class GradCodec(Protocol):
    """How gradients travel; the same value on every rank.

    parts: the elements of each range of a layout in all rows, [rows, size] with any stride between rows, or 1-D: rows
    one after the other, which may end early (what is missing is zeros, and is not written). Wires are uint8
    [rows, row_bytes]. inner: rows lie as [inner, rows / inner] (ops/gradients.py); 1 is their own order.
    """

    @property
    def block(self) -> int:
        """Consecutive elements that are not parted."""
        ...

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        ...

    @property
    def shares_scales(self) -> bool:
        """Whether all ranks use the same scales, with a head-room mu, and sums can saturate."""
        ...

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """The layout with the ranges that this codec keeps apart."""
        ...

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Whether an all-reduce gathers every contribution whole, instead of scattering parts and gathering sums."""
        ...

    def row_bytes(self, layout: FlatLayout) -> int:
        """Bytes of one row on the wire."""
        ...

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> Tensor | None:
        """What `group` agrees on before its ranks encode these rows, None where each does so by itself. mu: head-room
        in [1 / ranks, 1], 0-dim FP32, of codecs that share scales.
        """
        ...

    def encode(
        self, parts: Sequence[Tensor], rows: int, layout: FlatLayout, scales: Tensor | None = None, *, inner: int = 1
    ) -> Tensor:
        """Elements of a wire layout, any float dtype, as bytes."""
        ...

    def decode(
        self,
        wire: Tensor,
        parts: Sequence[Tensor],
        layout: FlatLayout,
        scales: Tensor | None = None,
        *,
        senders: int = 1,
        inner: int = 1,
    ) -> Tensor | None:
        """Write to `parts`, FP32, the sums of rows of `senders`, in their order. wire: each sender's rows together.

        Returns the number of their codes at the maximum, 0-dim int64; None where none can be.
        """
        ...


def decoded(wire: Tensor, codec: GradCodec, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
    """Each row of a wire, FP32 [rows, layout.size]."""
    rows = torch.empty(len(wire), layout.size, device=wire.device)
    layout = codec.wire_layout(layout)
    codec.decode(wire, layout.pieces(rows), layout, scales)
    return rows


def rounding_energy(rows: Tensor, codec: GradCodec, layout: FlatLayout) -> Tensor:
    """(signal, noise) of each range as this rank's encode sees it: sums of g^2 and of (decode(encode(g)) - g)^2, FP32
    [ranges, 2]. For codecs that need no scales of other ranks.

    Added up over the ranks, sqrt(noise / signal) is the reduction's error as a share of sqrt(sum_i |g_i|^2), without
    an FP32 reduction to compare with.
    """
    wire = codec.wire_layout(layout)
    error = decoded(codec.encode(wire.pieces(rows), len(rows), wire), codec, layout) - rows.float()
    pieces = zip(layout.pieces(rows.float()), layout.pieces(error))
    return torch.stack([torch.stack((signal.square().sum(), noise.square().sum())) for signal, noise in pieces])


def sqnr_db(exact: Tensor, reduced: Tensor) -> Tensor:
    """Signal-to-quantisation-noise ratio of a reduction in dB, 10 log10(|exact|^2 / |reduced - exact|^2), 0-dim."""
    noise = (reduced.double() - exact.double()).square().sum()
    return 10.0 * torch.log10(exact.double().square().sum() / noise)
