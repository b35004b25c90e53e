"""Wire format of gradients with scales shared by all ranks: rows of codes, whose sum is codes again.

    row = [plain elements of every range without codes, in BF16 | codes of every coded range]

    q_i = E4M3(s g_i)        q = E4M3(... E4M3(E4M3(q_0 + q_1) + q_2) ...)        sum_i g_i ~ q / s

s belongs to a range and is not sent, because all ranks have it. Plain elements are added in FP32. A row has an even
number of bytes. ops/gradients.py has the format with a scale per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.ops.formats import Format, parse_format
from lowprec_train.ops.gradients import NAN_CODE, in_rows, plain, write
from lowprec_train.ops.reference import divide, to_float
from lowprec_train.ops.rounding import encode
from lowprec_train.ops.schema import row_bytes_by


def encode_gradients_by(parts, rows, sizes, coded, scales, format):  # type: ignore[no-untyped-def]
    """Encode ranges to rows of bytes, uint8 [rows, row_bytes].

    parts: as in `encode_gradients`. scales: s of each range, FP32 [ranges]; ignored for plain ranges.
    """
    width, kind = row_bytes_by(sizes, coded, format), _checked_format(format, sizes, scales)
    ends: list[list[Tensor]] = [[], []]
    for part, size, has_codes, s in zip(parts, sizes, coded, scales.unbind(), strict=True):
        x = in_rows(part, rows, size)
        ends[has_codes].append(_codes(x, s, kind) if has_codes else plain(x, "BF16"))
    wire = torch.cat([*ends[0], *ends[1]], dim=1)
    return F.pad(wire, (0, width - wire.shape[1]))


def decode_gradients_by(wire, parts, sizes, coded, scales, format, senders, every_addition):  # type: ignore[no-untyped-def]
    """Sum rows from several senders into `parts`; return the number of summed codes at the maximum, 0-dim int64.

    wire: uint8 [senders * rows, row_bytes], the rows of each sender together. parts: as in `encode_gradients`, FP32.
    every_addition: round codes after every addition, and count elements that reach the maximum after any of them; else
    round their FP32 sum once, and count the results.
    """
    if wire.shape != (len(wire), row_bytes_by(sizes, coded, format)) or len(wire) % senders:
        raise ValueError(
            f"gradients of shape {tuple(wire.shape)} are not rows of {senders} senders with ranges of {sizes}"
        )
    kind = _checked_format(format, sizes, scales)
    sent = wire.unflatten(0, (senders, -1))
    coded_size = sum(size for size, has_codes in zip(sizes, coded, strict=True) if has_codes)
    starts = [0, 0]
    first = 2 * (sum(sizes) - coded_size)
    added = reduce(torch.add, sent[..., :first].contiguous().view(torch.bfloat16).float().unbind())
    summed, at = _add(sent[..., first : first + coded_size], kind, every_addition)
    count = torch.zeros((), dtype=torch.int64, device=wire.device)
    for part, size, has_codes, s in zip(parts, sizes, coded, scales.unbind(), strict=True):
        here = slice(starts[has_codes], starts[has_codes] + size)
        starts[has_codes] = here.stop
        write(part, summed[:, here] * divide(torch.ones_like(s), s) if has_codes else added[:, here])
        if has_codes:
            count += at[:, here].reshape(-1)[: part.numel()].sum()
    return count


def _checked_format(format: str, sizes: Sequence[int], scales: Tensor) -> Format:
    if format not in ("E4M3", "E5M2"):
        raise ValueError(f"codes under a shared scale are E4M3 or E5M2, not {format}")
    if scales.shape != (len(sizes),) or scales.dtype != torch.float32:
        raise ValueError(f"scales must be FP32 [{len(sizes)}], not {scales.dtype} {list(scales.shape)}")
    return parse_format(format)


def _codes(x: Tensor, s: Tensor, format: Format) -> Tensor:
    x = x.float() * s
    return encode(x, format).view(torch.uint8).masked_fill(x.isnan(), NAN_CODE)


def _add(sent: Tensor, format: Format, every_addition: bool) -> tuple[Tensor, Tensor]:
    """Add bytes [senders, rows, coded_size] in order; return the FP32 sums, and which of them count as saturated."""
    codes = sent.contiguous().view(format.carrier)
    total, at = to_float(codes[0]), torch.zeros(codes.shape[1:], dtype=torch.bool, device=codes.device)
    for code in codes[1:].unbind():
        total = total + to_float(code)
        if every_addition:
            total = to_float(encode(total, format))
            at |= total.abs() == format.max
    if not every_addition:
        total = to_float(encode(total, format))
        at = total.abs() == format.max
    return total, at
