"""What one rank's contribution to a gradient sum looks like on the wire: one encode, FP32 sums after decoding.

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
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.comm.layout import Layout
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32, Format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops.reference import exp2_int, exponent

BLOCK = 256
EXPONENT_BIAS = 127  # of E8M0 (OCP Microscaling 1.0): byte = exponent + 127, 255 is NaN
EXPONENT_NAN = 255


@dataclass(frozen=True)
class Payload:
    """How gradients travel: FP32 and BF16 as they are, E4M3 and E5M2 in blocks along the buffer.

    format: of the coded spans of a layout; the others travel in BF16, or in FP32 when everything does.
    block: consecutive elements that share a scale.

    Raises ValueError for another format and for an empty block.
    """

    format: Format = E4M3
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.format not in (FP32, BF16, E4M3, E5M2):
            raise ValueError(f"gradients travel in FP32, BF16, E4M3 or E5M2, not {self.format}")
        if self.block < 1:
            raise ValueError(f"a block has at least one element, not {self.block}")

    @property
    def quantizer(self) -> Quantizer:
        """Rounds coded spans, [n, multiple of block]."""
        return Quantizer(self.format, (1, self.block), ScaleRule.POW2)

    def wire_layout(self, layout: Layout) -> Layout:
        """The layout as this payload sees it: without scales there are no blocks to keep apart; a row is one span."""
        return layout if self.format.scaled else layout.uncoded()

    def row_bytes(self, layout: Layout) -> int:
        """Bytes on the wire of one row: plain elements, codes, block exponents, and one more where that is odd."""
        plain, coded = self._sizes(layout)
        return even(plain + coded + coded // self.block)

    def encode(self, rows: Tensor, layout: Layout) -> Tensor:
        """Gradients [n, layout.size] of any float dtype as bytes, uint8 [n, row_bytes]."""
        layout, parts = self.wire_layout(layout), []
        if layout.coded_size < layout.size:
            parts.append(encode_plain(layout.columns(rows, False, self.block), self._plain))
        if layout.coded_size:
            q = self.quantizer(layout.columns(rows, True, self.block))
            parts += [q.codes.view(torch.uint8), exponent_bytes(q.scale)]
        return join(parts)

    def decode(self, wire: Tensor, layout: Layout) -> Tensor:
        """Bytes [n, row_bytes] as FP32 [n, layout.size]."""
        layout = self.wire_layout(layout)
        plain, size = self._sizes(layout)
        coded, codes = wire[:, :0].float(), wire[:, plain : plain + size]
        if size:
            scale = scale_of_bytes(wire[:, plain + size : plain + size + size // self.block])
            coded = self.quantizer.wrap(codes.view(self.format.carrier), scale).dequantize()
        return layout.merge(coded, decode_plain(wire[:, :plain], self._plain), self.block)

    def decode_sum(self, wire: Tensor, layout: Layout) -> Tensor:
        """The sum of the rows' contributions in rank order, FP32 [layout.size]."""
        total = self.decode(wire[:1], layout)[0].clone()
        for row in wire.split(1)[1:]:
            total += self.decode(row, layout)[0]
        return total

    @property
    def _plain(self) -> Format:
        return BF16 if self.format.scaled else self.format

    def _sizes(self, layout: Layout) -> tuple[int, int]:
        """Bytes of plain elements and of codes in a row."""
        layout = self.wire_layout(layout)
        plain, coded = (layout.padded_size(each, self.block) for each in (False, True))
        return plain * self._plain.carrier.itemsize, coded

    def __str__(self) -> str:
        return f"{self.format.name}[{self.block}]" if self.format.scaled else self.format.name


def exponent_bytes(scale: Tensor) -> Tensor:
    """Power-of-two scales (FP32) as E8M0 bytes; NaN becomes 255."""
    return (exponent(scale) + EXPONENT_BIAS).to(torch.uint8)


def scale_of_bytes(exponents: Tensor) -> Tensor:
    """The FP32 scales that `exponent_bytes` took."""
    byte = exponents.int()
    return torch.where(byte == EXPONENT_NAN, torch.nan, exp2_int(byte - EXPONENT_BIAS))


def even(count: int) -> int:
    """Rows of an even number of bytes keep the BF16 elements of every row aligned."""
    return count + count % 2


def join(parts: list[Tensor]) -> Tensor:
    """Bytes [n, each] side by side, to an even number."""
    wire = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return F.pad(wire, (0, 1)) if wire.shape[1] % 2 else wire


def encode_plain(x: Tensor, format: Format) -> Tensor:
    """x [n, k] in an unscaled format, as bytes [n, k * itemsize]. A cast is its quantiser, and fills a GPU whatever the
    shape; a row's kernel has one block a row, and these rows are few and of many millions.
    """
    return x.to(format.carrier).contiguous().view(torch.uint8)


def decode_plain(wire: Tensor, format: Format) -> Tensor:
    """FP32 [n, k] from the bytes of `encode_plain`."""
    return wire.view(format.carrier).float()


def rounding_energy(rows: Tensor, payload: Payload, layout: Layout) -> Tensor:
    """(signal, noise) of each span as this rank's encode sees it: sums of g^2 and of (decode(encode(g)) - g)^2, FP32
    [spans, 2].

    Added up over the ranks, sqrt(noise / signal) is the reduction's error as a share of sqrt(sum_i |g_i|^2), without
    an FP32 reduction to compare with.
    """
    error = payload.decode(payload.encode(rows, layout), layout) - rows.float()
    pieces = zip(layout.pieces(rows.float()), layout.pieces(error))
    return torch.stack([torch.stack((signal.square().sum(), noise.square().sum())) for signal, noise in pieces])


def sqnr_db(exact: Tensor, reduced: Tensor) -> Tensor:
    """Signal-to-quantisation-noise ratio of a reduction in dB, 10 log10(|exact|^2 / |reduced - exact|^2), 0-dim."""
    noise = (reduced.double() - exact.double()).square().sum()
    return 10.0 * torch.log10(exact.double().square().sum() / noise)
