"""The wire format with one encode and FP32 sums after decoding.

    g = sum_i decode(encode(g_i))        encode: codes and one power-of-two scale per 256 consecutive elements

Each contribution is rounded once and the sum is taken in FP32, in rank order. The error of a parameter's sum is a share
of sqrt(sum_i |g_i|^2), whatever the number of ranks: 2.6 % for E4M3, 5.2 % for E5M2 (rounding errors of ranks add like
independent noise). A scale is its exponent, one byte, so an element costs 1 + 1/256 bytes instead of BF16's 2.

A non-finite element makes its whole block NaN wherever it arrives; a finite one never saturates (power-of-two scales
round up); a block of zeros is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.comm.grad_codec import decode_plain, encode_plain, even, join
from lowprec_train.comm.layout import FlatLayout
from lowprec_train.group import Group
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule

BLOCK = 256
E8M0 = torch.float8_e8m0fnu  # OCP Microscaling 1.0: the exponent of a power of two, or NaN, in a byte


@dataclass(frozen=True)
class BlockScaledCodec:
    """A `GradCodec`: FP32 and BF16 as they are, E4M3 and E5M2 in blocks along the buffer.

    format: of the coded ranges of a layout; the others travel in BF16, or in FP32 when everything does.
    block: consecutive elements that share a scale.

    Raises ValueError for another format and for an empty block.
    """

    format: Format = E4M3
    block: int = BLOCK

    shares_scales = False

    def __post_init__(self) -> None:
        if self.format not in (FP32, BF16, E4M3, E5M2):
            raise ValueError(f"gradients travel in FP32, BF16, E4M3 or E5M2, not {self.format}")
        if self.block < 1:
            raise ValueError(f"a block has at least one element, not {self.block}")

    @property
    def exact(self) -> bool:
        return self.format is FP32

    @property
    def quantizer(self) -> Quantizer:
        """Rounds coded ranges, [n, multiple of block]."""
        return Quantizer(self.format, (1, self.block), ScaleRule.POW2)

    def wire_layout(self, layout: FlatLayout) -> FlatLayout:
        """Without scales there are no blocks to keep apart: a row is one range."""
        return layout if self.format.scaled else FlatLayout.plain(layout.size)

    def chunks(self, layout: FlatLayout, limit: int) -> list[FlatLayout]:
        if limit < self.block or limit % self.block:
            raise ValueError(f"a chunk is a multiple of the block of {self.block} elements, not {limit}")
        return layout.chunks(limit)

    def sends_whole(self, layout: FlatLayout, ranks: int) -> bool:
        """Where that sends no more bytes: one rounding instead of two."""
        shard = self.wire_layout(layout).split(ranks, self.block)
        return self.row_bytes(layout) <= 2 * self.row_bytes(shard)

    def row_bytes(self, layout: FlatLayout) -> int:
        """Plain elements, codes, block exponents, and one more where that is odd."""
        plain, coded = self._sizes(layout)
        return even(plain + coded + coded // self.block)

    def scales(self, rows: Tensor, layout: FlatLayout, group: Group, mu: Tensor | None) -> None:
        """Blocks have scales of their own, which travel with them."""

    def encode(self, rows: Tensor, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
        layout, parts = self.wire_layout(layout), []
        if layout.coded_size < layout.size:
            parts.append(encode_plain(layout.columns(rows, False, self.block), self._plain))
        if layout.coded_size:
            q = self.quantizer(layout.columns(rows, True, self.block))
            parts += [each.view(torch.uint8) for each in (q.codes, q.scale.to(E8M0))]
        return join(parts)

    def decode(self, wire: Tensor, layout: FlatLayout, scales: Tensor | None = None) -> Tensor:
        layout = self.wire_layout(layout)
        plain, size = self._sizes(layout)
        coded, codes = wire[:, :0].float(), wire[:, plain : plain + size]
        if size:
            scale = wire[:, plain + size : plain + size + size // self.block].view(E8M0).float()
            coded = self.quantizer.wrap(codes.view(self.format.carrier), scale).dequantize()
        return layout.merge(coded, decode_plain(wire[:, :plain], self._plain), self.block)

    def decode_sum(self, wire: Tensor, layout: FlatLayout, scales: Tensor | None = None) -> tuple[Tensor, None]:
        """Decodes one row at a time: no more than one is in FP32 beside the sum."""
        total = self.decode(wire[:1], layout)[0].clone()
        for row in wire.split(1)[1:]:
            total += self.decode(row, layout)[0]
        return total, None

    @property
    def _plain(self) -> Format:
        return BF16 if self.format.scaled else self.format

    def _sizes(self, layout: FlatLayout) -> tuple[int, int]:
        """Bytes of plain elements and of codes in a row."""
        layout = self.wire_layout(layout)
        plain, coded = (layout.padded_size(each, self.block) for each in (False, True))
        return plain * self._plain.carrier.itemsize, coded

    def __str__(self) -> str:
        return f"{self.format.name}[{self.block}]" if self.format.scaled else self.format.name
