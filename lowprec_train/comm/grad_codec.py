"""The wire format of one rank's gradient contribution: the interface of codecs, and functions for all of them.

    g = sum_i decode(encode(g_i))        one contribution per rank, as bytes; the receiver sums them

There are two codecs: blocks with their own scales (`block_scaled`), and one scale for all ranks (`shared_scale`).
Vectors are not coded: they are sent in BF16 or FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group


class GradCodec(Protocol):
    """A wire format of gradients; equal on every rank.

    parts: the elements of each range of a layout in all rows, [rows, size] with any stride between rows, or 1-D: rows
    one after the other, maybe truncated (missing elements are zeros, and are not written). Wires are uint8
    [rows, row_bytes]. inner: rows are ordered as [inner, rows / inner] (ops/gradients.py); 1 is their natural order.
    """

    @property
    def block(self) -> int:
        """Number of consecutive elements that must stay together."""

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""

    @property
    def sends_bf16(self) -> bool:
        """Whether all elements are sent in BF16: gradients in BF16 are then sent as they are."""

    @property
    def bf16_suffices(self) -> bool:
        """Whether gradients that are sent at once may be written in BF16, because no element is sent in more bits."""

    @property
    def shares_scales(self) -> bool:
        """Whether all ranks use the same scales, with a head-room mu, and sums can saturate."""

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """Return the layout with the ranges that this codec distinguishes."""

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Return whether an all-reduce gathers whole contributions, instead of scattering parts and gathering sums."""

    def row_bytes(self, layout: FlatLayout) -> int:
        """Return the bytes of one row on the wire."""

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> Tensor | None:
        """Return the scales on which `group` agrees before its ranks encode these rows; None if each rank has its own.
        mu: head-room in [1 / ranks, 1], 0-dim FP32, of codecs that share scales.
        """

    def sends_unchanged(self, parts: Sequence[Tensor], rows: int, layout: FlatLayout) -> bool:
        """Return whether the elements of a layout are sent as they lie, each range for itself, without `encode`."""

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
        """Encode the elements of a wire layout, of any float dtype, as bytes, in `out` if it is given."""

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
    ) -> Tensor | None:
        """Write to `parts`, FP32, the sums of the rows of `senders`, in their order. wire: the senders' rows in turn;
        or a tensor for each sender; or `by_range`, one row of each, unchanged: each range of all senders in turn.

        Returns the number of codes at the maximum in these sums, 0-dim int64; None if the sums are not codes.
        """


def decoded(wire: Tensor, codec: GradCodec, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
    """Decode each row of a wire to FP32 [rows, layout.size]."""
    rows = torch.empty(len(wire), layout.size, device=wire.device)
    layout = codec.wire_layout(layout)
    codec.decode(wire, layout.pieces(rows), layout, scales)
    return rows


def rounding_energy(rows: Tensor, codec: GradCodec, layout: FlatLayout) -> Tensor:
    """Return (signal, noise) of each range under this rank's encode: sums of g^2 and of (decode(encode(g)) - g)^2, FP32
    [ranges, 2]. For codecs that need no scales of other ranks.

    Summed over the ranks, sqrt(noise / signal) is the error of the reduction relative to sqrt(sum_i |g_i|^2). No FP32
    reduction is needed to compare with.
    """
    wire = codec.wire_layout(layout)
    error = decoded(codec.encode(wire.pieces(rows), len(rows), wire), codec, layout) - rows.float()
    pieces = zip(layout.pieces(rows.float()), layout.pieces(error))
    return torch.stack([torch.stack((signal.square().sum(), noise.square().sum())) for signal, noise in pieces])


def sqnr_db(exact: Tensor, reduced: Tensor) -> Tensor:
    """Return 10 log10(|exact|^2 / |reduced - exact|^2), the signal-to-quantisation-noise ratio in dB, 0-dim."""
    noise = (reduced.double() - exact.double()).square().sum()
    return 10.0 * torch.log10(exact.double().square().sum() / noise)
