"""Test cases of the ops of gradient communication (ops/cases.py): ranges that end within a block, rows that end early,
blocks of 256 and of odd sizes, permuted rows, several senders, Inf and NaN in one block; scales shared by all ranks,
with which sums saturate, one of them NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops.gradients import encode_gradients
from lowprec_train.ops.schema import row_bytes
from lowprec_train.ops.shared_gradients import encode_gradients_by

FP32, BF16 = torch.float32, torch.bfloat16
SIZES, CODED = [1400, 6, 390, 512], [1, 0, 1, 1]
PARTS, FEW = [384, 90], [1, 0]


def encode_cases(rows: Tensor, bad: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return cases of `encode_gradients`. rows, bad: FP32 [4, sum(SIZES)]; `bad` has Inf and NaN."""
    flat, how = rows.flatten(), (SIZES, CODED)

    def parts(x: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in x.split(SIZES, 1)]

    cases: dict[str, tuple[int, list[Tensor], list[int], list[int], str, int, int]] = {
        "E4M3": (4, parts(rows), *how, "E4M3", 256, 1),
        "E5M2 of BF16": (4, parts(rows.bfloat16()), *how, "E5M2", 256, 2),
        "blocks of 33": (4, parts(rows.half()), *how, "E4M3", 33, 4),
        "rows that end early": (4, [flat[:1301], flat[1304:1604]], PARTS, FEW, "E4M3", 256, 1),
        "an empty part": (4, [flat[:0], flat[:360]], PARTS, FEW, "E5M2", 64, 2),
        "BF16": (8, [flat[:2399]], [300], [0], "BF16", 256, 4),
        "FP32": (8, [flat[:2400].bfloat16()], [300], [0], "FP32", 256, 1),
        "Inf and NaN": (4, parts(bad), *how, "E4M3", 256, 1),
        "Inf and NaN in BF16": (4, [bad.flatten()], [sum(SIZES)], [0], "BF16", 256, 1),
    }
    return {name: _with_wire(*given) for name, given in cases.items()}


def _with_wire(
    rows: int, parts: list[Tensor], sizes: list[int], coded: list[int], format: str, block: int, inner: int
) -> tuple[Any, ...]:
    """Return the arguments of `encode_gradients`, with a wire that has other bytes."""
    wire = torch.full((rows, row_bytes(sizes, coded, format, block)), 7, dtype=torch.uint8)
    return wire, parts, sizes, coded, format, block, inner


def decode_cases(rows: Tensor, bad: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return encoded `encode_cases`, as rows of one sender, and with each row from another sender, on one wire and on
    wires apart.
    """
    made: dict[str, tuple[Any, ...]] = {}
    for name, arguments in encode_cases(rows, bad).items():
        wire, parts, sizes, coded, format, block, inner = arguments
        encode_gradients(*arguments)
        whole = [torch.zeros(part.shape) for part in parts]
        made[name] = ([wire], whole, sizes, coded, format, block, 1, inner)
        for where, wires in {"": [wire], " from wires apart": [row[None] for row in wire]}.items():
            sums = [torch.zeros(size) for size in sizes]
            made[f"{name}, summed{where}"] = (wires, sums, sizes, coded, format, block, len(wire), 1)
    for name, sizes, sent in (
        ("BF16", [1400, 6, 390, 512], rows.bfloat16()),
        ("FP32", [1400, 520, 388], rows),
        ("odd ranges of BF16", [3, 1401, 904], bad.bfloat16()),
    ):
        apart = [each.contiguous().view(torch.uint8).flatten() for each in sent.split(sizes, 1)]
        wire, sums = torch.cat(apart).view(len(rows), -1), [torch.zeros(size) for size in sizes]
        how = (sizes, [0] * len(sizes), "FP32" if name == "FP32" else "BF16", 256, len(rows), 1)
        made[f"{name}, range by range"] = ([wire], sums, *how, True)
    return made


def encode_by_cases(rows: Tensor, bad: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return cases of `encode_gradients_by`. rows, bad: as in `encode_cases`."""
    flat, s = rows.flatten(), torch.tensor([0.3, 1.0, 2.0**7, torch.nan])
    parts = {dtype: [part.to(dtype).contiguous() for part in rows.split(SIZES, 1)] for dtype in (FP32, BF16)}
    return {
        "E4M3": (parts[FP32], 4, SIZES, CODED, s, "E4M3"),
        "E5M2 of BF16": (parts[BF16], 4, SIZES, CODED, s, "E5M2"),
        "rows that end early": ([flat[:1301], flat[1304:1604]], 4, PARTS, FEW, s[:2], "E4M3"),
        "an odd row": ([flat[:0], flat[:91]], 1, [3, 91], [0, 1], s[1:3], "E4M3"),
        "Inf and NaN": ([part.contiguous() for part in bad.split(SIZES, 1)], 4, SIZES, CODED, s, "E4M3"),
    }


def decode_by_cases(rows: Tensor, bad: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return encoded `encode_by_cases`, as rows of one sender, and with each row from another sender, rounded after
    every addition or once.
    """
    made: dict[str, tuple[Any, ...]] = {}
    for name, arguments in encode_by_cases(rows, bad).items():
        parts, count, *how = arguments
        wire = encode_gradients_by(*arguments)
        made[name] = (wire, [torch.zeros(part.shape) for part in parts], *how, 1, True)
        for each in (True, False):
            made[f"{name}, summed, {each}"] = (wire, [torch.zeros(size) for size in how[0]], *how, count, each)
    return made
