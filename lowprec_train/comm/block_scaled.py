"""The wire format with one encode and FP32 sums after decoding.

    g = sum_i decode(encode(g_i))        encode: codes and one power-of-two scale per 256 consecutive elements

Each contribution is encoded once, from BF16 or FP32, and the sum is computed in FP32, in rank order. The error of a
parameter's sum relative to sqrt(sum_i |g_i|^2) does not depend on the number of ranks: 2.6 to 2.7 % for E4M3, 5.3 % for
E5M2 (rounding errors of ranks add like independent noise). A scale is one exponent byte, so an element needs 1 + 1/256
bytes; BF16 needs 2.

A non-finite element makes its whole block NaN on the receiver. A finite element never saturates (power-of-two scales
round up). A block of zeros is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from lowprec_train.ops.schema import row_bytes

BLOCK = 256


@dataclass(frozen=True)
class BlockScaledCodec:
    """A `GradCodec`: FP32 and BF16 unchanged, E4M3 and E5M2 in blocks along the buffer.

    format: of the coded ranges of a layout; the other ranges are sent in BF16, or in FP32 if `format` is FP32.
    block: consecutive elements that share a scale.

    Raises ValueError for another format and for an empty block.
    """

    format: Format = E4M3
    block: int = BLOCK

    shares_scales = False

    def __post_init__(self) -> None:
        if self.format not in (FP32, BF16, E4M3, E5M2):
            raise ValueError(f"gradients are sent in FP32, BF16, E4M3 or E5M2, not {self.format}")
        if self.block < 1:
            raise ValueError(f"a block has at least one element, not {self.block}")

    @property
    def exact(self) -> bool:
        return self.format is FP32

    @property
    def sends_bf16(self) -> bool:
        return self.format is BF16

    @property
    def bf16_suffices(self) -> bool:
        return not self.exact

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """Return the layout as sent. Without scales there are no blocks, so a row is one range."""
        return layout if self.format.scaled else FlatLayout.plain(layout.size)

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Return whether sending whole contributions needs no more bytes; it rounds once instead of twice."""
        shard = self.wire_layout(layout).split(ranks, self.block)
        return self.row_bytes(layout) <= 2 * self.row_bytes(shard)

    def row_bytes(self, layout: FlatLayout) -> int:
        """Return the bytes of a row: plain elements, codes, block exponents, and one more if that is odd."""
        return row_bytes(*self.wire_layout(layout).table(), self.format.name, self.block)

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> None:
        """Return None: blocks have their own scales, which are sent with them."""

    def sends_unchanged(self, parts: Sequence[Tensor], rows: int, layout: FlatLayout) -> bool:
        if self.format.scaled:
            return False
        sizes = [each.size for each in layout.ranges] if len(parts) > 1 else [layout.size]
        return all(self._unchanged(part, rows * size) for part, size in zip(parts, sizes, strict=True))

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
        """Encode in one pass, or return the elements as bytes if they are sent unchanged."""
        if out is None and inner == 1 and len(parts) == 1 and self.sends_unchanged(parts, rows, layout):
            return parts[0].view(torch.uint8).view(rows, -1)
        table, format = self._table(parts, layout), self.format.name
        if out is None:
            out = torch.empty(rows, row_bytes(*table, format, self.block), dtype=torch.uint8, device=parts[0].device)
        torch.ops.lowprec.encode_gradients(out, parts, *table, format, self.block, inner)
        return out

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
    ) -> None:
        """Decode in one pass, for any number of senders."""
        wires, table = [wire] if isinstance(wire, Tensor) else wire, self._table(parts, layout)
        decode = torch.ops.lowprec.decode_gradients
        decode(wires, parts, *table, self.format.name, self.block, senders, inner, by_range)

    def _table(self, parts: Sequence[Tensor], layout: FlatLayout) -> tuple[list[int], list[int]]:
        """Return the ranges of `parts` as ops take them: the layout's, or the whole row as one without scales."""
        if self.format.scaled:
            return layout.table()
        if len(parts) == 1:
            return self.wire_layout(layout).table()
        return [each.size for each in layout.ranges], [0] * len(layout.ranges)

    def _unchanged(self, part: Tensor, size: int) -> bool:
        return part.dtype == self.format.carrier and part.is_contiguous() and part.numel() == size

    def __str__(self) -> str:
        return f"{self.format.name}[{self.block}]" if self.format.scaled else self.format.name
