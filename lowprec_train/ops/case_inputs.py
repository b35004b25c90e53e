"""Input matrices with the values at which kernels fail: zeros of both signs, a zero row, subnormals, values next to
powers of two and to ties, Inf and NaN in one tile. Random bits are from Philox, so they are the same on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.philox import random_bits

EDGES = (0.0, -0.0, 1e-40, -3e-39, 2.0**-126, 0.99999994, 1.0, 1.0000001, -6.0, 5.9999995, 448.0, 65504.0)


def values(rows: int, columns: int, *, seed: int = 1, edges: bool = True) -> Tensor:
    """Return FP32 [rows, columns] over about thirty binades, with EDGES in the first row and zeros in the last."""
    words = random_bits(torch.tensor(seed), None, 2 * rows, columns).to(torch.int64)
    sign_exponent = ((words[:rows] & 1) << 31) | ((words[:rows] >> 1) % 30 + 112 << 23)
    x = (sign_exponent | words[rows:] << 7).to(torch.int32).view(torch.float32).clone()
    if edges:
        x[-1] = 0.0
        x[0, : len(EDGES)] = torch.tensor(EDGES)[:columns]
    return x


def spoilt(rows: int, columns: int) -> Tensor:
    """Return `values` with Inf in the first row and NaN in the second; kernels must show them in the whole tile."""
    x = values(rows, columns)
    x[0, columns // 2], x[1, columns - 1] = -torch.inf, torch.nan
    return x


def ties(format: str, columns: int = 64) -> Tensor:
    """Return FP32 [127, columns]: each row has midpoints between values of a format, of both signs, and the maximum,
    times an odd number. Multiplication by the rounded inverse of the scale moves 7 % of them.
    """
    mantissa, low, limit = (of := parse_format(format)).mantissa_bits, of.min_exponent, of.max
    middles = torch.arange(1, 2 ** (mantissa + 2), 2).float() * 2.0 ** (low - mantissa - 1)
    upper = middles[len(middles) // 2 :, None] * 2.0 ** torch.arange(1, 14)  # higher binades scale the second
    middles = torch.cat([middles, upper.flatten()])
    middles = middles[middles < limit]
    row = torch.cat([torch.tensor([limit]), middles, -middles])
    odd = torch.arange(3, 257, 2).float()[:, None]
    return row[torch.arange(columns) * 7919 % len(row)] * odd * 2.0**-9


def e2m1(rows: int, columns: int) -> Tensor:
    """Return all sixteen E2M1 codes in random order."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    words = random_bits(torch.tensor(2), None, rows, columns)
    return (grid[words >> 1 & 7] * (1.0 - 2.0 * (words & 1))).to(torch.float8_e4m3fn)


def normal(rows: int, columns: int, seed: int = 41) -> Tensor:
    """Return BF16 values with about a normal distribution (a sum of four uniform draws), and one zero."""
    words = random_bits(torch.tensor(seed), None, 4 * rows, columns).float() / 65536 - 0.5
    x = words.unflatten(0, (4, rows)).sum(0) * 3**0.5
    x[0, 0] = 0.0
    return x.bfloat16()
