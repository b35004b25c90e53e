"""Wire format of gradients: rows of codes, one row per receiver, and sums of them.

    row = [plain elements of every range without codes | codes of every coded range | their block exponents]

A range is a parameter's share of a row (comm/layout.py). Coded ranges are split into blocks of consecutive elements,
the last one padded with zeros; a block has one scale, a power of two rounded up, sent as an exponent byte (E8M0). Plain
elements are sent in BF16, or in FP32 if the format is FP32. A row has an even number of bytes, so that plain elements
are aligned in every row.

A row without codes may be sent range by range, from where its elements lie: a wire `by_range` has the elements of range
0 from all senders, then those of range 1, and so on.

The order of rows in memory is [inner, rows / inner]: row r is at (r % inner) (rows / inner) + r / inner. With inner = 1
rows are in order; with the ranks of a node as `inner`, rows for the same-numbered ranks of all nodes are neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.reference import tile_scale, to_float
from lowprec_train.ops.rounding import encode
from lowprec_train.ops.schema import plain_bytes, row_bytes

E8M0 = torch.float8_e8m0fnu  # OCP Microscaling 1.0: the exponent of a power of two, or NaN, in a byte
NAN_CODE = 0x7F  # of E4M3 and of E5M2


def places(rows: int, inner: int) -> list[int]:
    """Return the position of each row in memory. Raises ValueError if `inner` does not divide the rows."""
    if inner < 1 or rows % inner:
        raise ValueError(f"{rows} rows are not {inner} equal groups")
    return [row % inner * (rows // inner) + row // inner for row in range(rows)]


def encode_gradients(wire, parts, sizes, coded, format, block, inner):  # type: ignore[no-untyped-def]
    """Encode ranges to rows of bytes, and write them to `wire`.

    wire: uint8 [rows, row_bytes], dense. parts: for each range its elements in all rows: [rows, size] with any stride
    between rows, or 1-D with at most rows * size elements; missing ones are zeros. A non-finite element makes its block
    NaN. Raises ValueError for a wire of another size.
    """
    rows, width = len(wire), row_bytes(sizes, coded, format, block)
    if wire.shape != (rows, width) or wire.dtype != torch.uint8 or not wire.is_contiguous():
        raise ValueError(f"rows of these ranges are dense uint8 [rows, {width}], not {wire.dtype} {list(wire.shape)}")
    plains, codes, exponents = [], [], []
    for part, size, has_codes in zip(parts, sizes, coded, strict=True):
        x = in_rows(part, rows, size)
        if has_codes:
            made = _encode_blocks(x, format, block)
            codes.append(made[0])
            exponents.append(made[1])
        else:
            plains.append(plain(x, format))
    made = torch.cat([*plains, *codes, *exponents], dim=1)
    wire[places(rows, inner)] = F.pad(made, (0, width - made.shape[1]))


def decode_gradients(wires, parts, sizes, coded, format, block, senders, inner, by_range=False):  # type: ignore[no-untyped-def]
    """Sum rows from several senders, and write the sums to `parts`.

    wires: one tensor for each sender, uint8 [rows, row_bytes], which may lie in the memory of another GPU; or one for
    all, [senders * rows, row_bytes], the rows of each sender together, or `by_range`, with one row of each sender and
    no codes. parts: as in `encode_gradients`, FP32. Rows are decoded and added in the order of the senders,
    in FP32. Raises ValueError for wires of another number or size.
    """
    if len(wires) not in (1, senders) or any(each.shape != wires[0].shape for each in wires):
        raise ValueError(f"{senders} senders have one wire each or one for all, not {[list(w.shape) for w in wires]}")
    if by_range and len(wires) > 1:
        raise ValueError(f"{len(wires)} wires apart are not sent range by range")
    wire = wires[0] if len(wires) == 1 else torch.cat(list(wires))
    if wire.dtype != torch.uint8:
        raise ValueError(f"wires are uint8, not {wire.dtype}")
    if wire.shape != (len(wire), row_bytes(sizes, coded, format, block)) or len(wire) % senders:
        raise ValueError(
            f"gradients of shape {tuple(wire.shape)} are not rows of {senders} senders with ranges of {sizes}"
        )
    rows = len(wire) // senders
    if by_range:
        if rows != 1 or any(coded):
            raise ValueError(f"only one row without codes is sent range by range, not {rows} with codes in {coded}")
        widths = [size * plain_bytes(format) for size in sizes]
        sent = wire.flatten()[: senders * sum(widths)].split([senders * width for width in widths])
        wire = torch.cat([each.view(senders, -1) for each in sent], 1)
    each = wire.unflatten(0, (senders, rows))[:, places(rows, inner)]
    ends = {0: 0, 1: plain_bytes(format) * sum(s for s, has_codes in zip(sizes, coded, strict=True) if not has_codes)}
    scales = ends[1] + sum(-(-s // block) * block for s, has_codes in zip(sizes, coded, strict=True) if has_codes)
    for part, size, has_codes in zip(parts, sizes, coded, strict=True):
        start, blocks = ends[has_codes], -(-size // block)
        ends[has_codes] = end = start + (blocks * block if has_codes else size * plain_bytes(format))
        total = None
        for sent in each:
            x = _decode_range(sent[:, start:end], sent[:, scales : scales + blocks], has_codes, format, block)[:, :size]
            total = x if total is None else total + x
        scales += blocks * has_codes
        write(part, total)


def in_rows(part: Tensor, rows: int, size: int) -> Tensor:
    """Return the part as [rows, size]. Raises ValueError for a part of another size."""
    if part.shape == (rows, size):
        return part
    if part.dim() != 1 or part.numel() > rows * size:
        raise ValueError(f"a part with {rows} rows of {size} elements cannot have shape {tuple(part.shape)}")
    return F.pad(part, (0, rows * size - part.numel())).view(rows, size)


def write(part: Tensor, rows: Tensor) -> None:
    """Write the rows to the part, as many elements as it has."""
    in_rows(part, *rows.shape)
    part.copy_(rows.reshape(-1)[: part.numel()].view_as(part))


def _encode_blocks(x: Tensor, format: str, block: int) -> tuple[Tensor, Tensor]:
    """Return codes [rows, padded size] and exponents [rows, blocks] of a range, as bytes."""
    x = F.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    scale, inverse = tile_scale(x.abs().amax(2), parse_format(format), "POW2", 1.0, 0)
    codes = encode(x * inverse[:, :, None], parse_format(format)).view(torch.uint8)
    return codes.masked_fill(scale.isnan()[:, :, None], NAN_CODE).flatten(1), scale.to(E8M0).view(torch.uint8)


def plain(x: Tensor, format: str) -> Tensor:
    """Return elements as bytes, with one bit pattern for NaN: casts to BF16 do not define it."""
    if format == "FP32":
        return x.float().contiguous().view(torch.uint8)
    return x.bfloat16().masked_fill(x.isnan(), torch.nan).contiguous().view(torch.uint8)


def _decode_range(sent: Tensor, exponents: Tensor, has_codes: int, format: str, block: int) -> Tensor:
    """Decode a range's bytes to FP32 [rows, elements]."""
    if not has_codes:
        return sent.contiguous().view(torch.float32 if format == "FP32" else torch.bfloat16).float()
    codes = to_float(sent.contiguous().view(parse_format(format).carrier)).unflatten(1, (-1, block))
    return (codes * exponents.contiguous().view(E8M0).float()[:, :, None]).flatten(1)
