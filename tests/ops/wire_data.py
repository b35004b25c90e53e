"""Gradients for the tests of the ops that put them on the wire: layouts, and values at which kernels go wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.schema import row_bytes

# name -> (sizes of ranges, which of them are coded, block)
RANGES = {
    "one": ([4096], [1], 256),
    "one element": ([1], [1], 256),
    "ends within a block": ([4096 + 12, 260, 1028], [1, 1, 1], 256),
    "odd": ([1001, 3, 777, 255, 1], [1, 0, 1, 1, 0], 256),
    "plain": ([1000, 515], [0, 0], 256),
    "plain first": ([2048, 1024, 516], [0, 1, 1], 256),
    "small blocks": ([1000, 96], [1, 1], 32),
    "blocks of 7": ([100, 14, 9], [1, 0, 1], 7),
    "large blocks": ([3000, 512], [1, 1], 1024),
    "many": ([256 + 4 * (i % 3) for i in range(101)], [int(i % 5 != 0) for i in range(101)], 256),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def payloads(coded: list[int]) -> list[str]:
    return ["E4M3", "E5M2"] + ([] if any(coded) else ["BF16", "FP32"])


def rows_of(encode, parts: list[Tensor], rows: int, sizes, coded, format: str, block: int, inner: int) -> Tensor:
    """The rows that `encode` writes over other bytes."""
    wire = torch.full((rows, row_bytes(sizes, coded, format, block)), 7, dtype=torch.uint8, device=parts[0].device)
    encode(wire, parts, sizes, coded, format, block, inner)
    return wire


def gradients(rows: int, size: int, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, size] of a kind: normal over many binades, subnormal, zeros of both signs, or with Inf and NaN here and
    there.
    """
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(rows, size, generator=generator)
    if kind == "normal":
        x *= torch.linspace(-20, 20, size).exp2()
    elif kind == "tiny":
        x *= 2.0**-140
    elif kind == "huge":
        x *= 2.0**126
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "special":
        x = x.masked_fill(torch.rand(rows, size, generator=generator) < 2e-3, torch.nan)
        x = x.masked_fill(torch.rand(rows, size, generator=generator) < 2e-3, -torch.inf)
    return x.to(dtype)


KINDS = ("normal", "tiny", "huge", "zeros", "special")


def same(a: Tensor, b: Tensor) -> bool:
    """Bits; any NaN equals any other. Bytes as they are."""
    a, b = a.cpu(), b.cpu()
    if a.dtype == torch.uint8:
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        *(x.nan_to_num(1, torch.inf, -torch.inf).view(torch.int32) for x in (a, b))
    )
