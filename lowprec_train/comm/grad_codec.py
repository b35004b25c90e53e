"""The wire format of one rank's gradient contribution: what a codec is, and what codecs share.

    g = sum_i decode(encode(g_i))        one contribution a rank, as bytes; the sum is the receiver's

Two codecs: blocks with scales of their own (`block_scaled`), one scale for all ranks (`shared_scale`). What is not
coded (vectors) travels in BF16 or FP32.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group
from lowprec_train.numerics.formats import Format


class GradCodec(Protocol):
    """How gradients travel; the same value on every rank.

    Rows are [n, layout.size] of any float dtype, wires uint8 [n, row_bytes].
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

    def chunks(self, layout: FlatLayout, limit: int) -> list[FlatLayout]:
        """A wire layout in messages of at most `limit` elements a row. ValueError for a limit that cuts blocks."""
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

    def encode(self, rows: Tensor, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
        """Rows as bytes."""
        ...

    def decode(self, wire: Tensor, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
        """Bytes as rows, FP32."""
        ...

    def decode_sum(
        self, wire: Tensor, layout: FlatLayout, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(the sum of the rows in rank order, FP32 [layout.size]; the number of codes at the maximum, 0-dim int64, None
        where none can be).
        """
        ...


def encode_plain(x: Tensor, format: Format) -> Tensor:
    """x [n, k] in an unscaled format, as bytes [n, k * itemsize]. A cast is its quantiser, and fills a GPU whatever the
    shape; a row's kernel has one block a row, and these rows are few and of many millions.
    """
    return x.to(format.carrier).contiguous().view(torch.uint8)


def decode_plain(wire: Tensor, format: Format) -> Tensor:
    """FP32 [n, k] from the bytes of `encode_plain`."""
    return wire.view(format.carrier).float()


def even(count: int) -> int:
    """Rows of an even number of bytes keep the BF16 elements of every row aligned."""
    return count + count % 2


def join(parts: list[Tensor]) -> Tensor:
    """Bytes [n, each] side by side, to an even number."""
    wire = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return F.pad(wire, (0, 1)) if wire.shape[1] % 2 else wire


def rounding_energy(rows: Tensor, codec: GradCodec, layout: FlatLayout) -> Tensor:
    """(signal, noise) of each range as this rank's encode sees it: sums of g^2 and of (decode(encode(g)) - g)^2, FP32
    [ranges, 2]. For codecs that need no scales of other ranks.

    Added up over the ranks, sqrt(noise / signal) is the reduction's error as a share of sqrt(sum_i |g_i|^2), without
    an FP32 reduction to compare with.
    """
    error = codec.decode(codec.encode(rows, layout), layout) - rows.float()
    pieces = zip(layout.pieces(rows.float()), layout.pieces(error))
    return torch.stack([torch.stack((signal.square().sum(), noise.square().sum())) for signal, noise in pieces])


def sqnr_db(exact: Tensor, reduced: Tensor) -> Tensor:
    """Signal-to-quantisation-noise ratio of a reduction in dB, 10 log10(|exact|^2 / |reduced - exact|^2), 0-dim."""
    noise = (reduced.double() - exact.double()).square().sum()
    return 10.0 * torch.log10(exact.double().square().sum() / noise)
