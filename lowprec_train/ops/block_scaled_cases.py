"""Test cases of `block_scaled_mm` whose sums are exact in any order: few codes are not zero, and sums need at most 17
bits. So a tensor core must return the bits of the reference; other bits mean that its scales have another layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_train.ops.block_scaled import BLOCKS
from lowprec_train.ops.case_inputs import e2m1
from lowprec_train.ops.philox import random_bits

RUNGS = torch.tensor([1.0, 1.25, 1.5, 2.0, 3.0, 0.5, 0.0, 4.0])
GAIN = 4 / 3


def _random_integers(rows: int, columns: int, below: int, seed: int) -> Tensor:
    return random_bits(torch.tensor(seed), None, rows, columns).to(torch.int64) % below


def _codes(rows: int, k: int, seed: int) -> Tensor:
    """Return E2M1 values in E4M3, of which one in four is not zero; the last of several rows is all zero."""
    x = torch.where(_random_integers(rows, k, 4, seed) == 0, e2m1(rows, k).float(), 0.0)
    if rows > 1:
        x[-1] = 0.0
    return x.to(torch.float8_e4m3fn)


def _one_hot(rows: int, k: int, values: list[float]) -> Tensor:
    x = torch.zeros(rows, k)
    place = torch.arange(rows)
    x[place, place * 5 % k] = torch.tensor(values)[place % len(values)]
    return x.to(torch.float8_e4m3fn)


def _scales(format: str, rows: int, k: int, seed: int) -> Tensor:
    """Return scales whose neighbours differ along both dimensions; those of NVFP4 include zero."""
    drawn = _random_integers(rows, k // BLOCKS[format], 8, seed)
    return RUNGS[drawn].to(torch.float8_e4m3fn) if format == "NVFP4" else 2.0 ** (drawn % 4).float()


def _factors(format: str, gain: float) -> tuple[Tensor | None, Tensor | None]:
    if format == "NVFP4":
        return torch.tensor([[0.5]]), torch.tensor([[4.0]])
    return (torch.tensor([[gain]]), torch.tensor([[gain]])) if gain != 1.0 else (None, None)


def _case(format: str, m: int, n: int, k: int, dtype: torch.dtype, tall: int = 1) -> tuple[Any, ...]:
    """tall: rows of b that share a scale."""
    left, right = _factors(format, 1.0)
    scale_a, scale_b = _scales(format, m, k, 3), _scales(format, n // tall, k, 4)
    return _codes(m, k, 5), scale_a, _codes(n, k, 6), scale_b, left, right, format, dtype


def _extremes(format: str) -> tuple[Any, ...]:
    """Return a case with the largest and smallest scales, the largest codes, and the gains of MXFP4's headroom."""
    high, low = (448.0, 2.0**-9) if format == "NVFP4" else (2.0**100, 2.0**-100)
    codes = [448.0, -1.625, 2.0**-9] if format == "MXFP8" else [6.0, -1.5, 0.5]
    odd = torch.arange(64 // BLOCKS[format]) % 2 == 1
    kind = torch.float8_e4m3fn if format == "NVFP4" else torch.float32
    scale_a = torch.where(odd, high, low).expand(16, -1).to(kind).contiguous()
    scale_b = torch.where(odd, low, high).expand(16, -1).to(kind).contiguous()
    a, b = _one_hot(16, 64, codes), _one_hot(16, 64, [1.0, -2.0, 4.0])
    left, right = _factors(format, GAIN)
    return a, scale_a, b, scale_b, left, right, format, torch.float32


def block_scaled_cases(format: str) -> dict[str, tuple[Any, ...]]:
    """Return arguments of the op by case name: several shapes, in FP32 and BF16 (MXFP4: BF16 only)."""
    whole, narrow = torch.bfloat16 if format == "MXFP4" else torch.float32, torch.bfloat16
    return {
        f"{format}, one row, least k": _case(format, 1, 16, 32, whole),
        f"{format}, odd rows": _case(format, 37, 48, 96, narrow),
        f"{format}, several tiles of scales": _case(format, 131, 144, 320, whole),
        f"{format}, squares": _case(format, 64, 32, 64, narrow, tall=16),
        f"{format}, largest and least scales": _extremes(format),
    }


def cases() -> dict[str, tuple[Any, ...]]:
    """Return the cases of all formats."""
    return {name: case for format in BLOCKS for name, case in block_scaled_cases(format).items()}
