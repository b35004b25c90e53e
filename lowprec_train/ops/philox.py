"""Philox4x32-10 (Salmon et al., SC 2011) as a pure function of (seed, row, column): 16 random bits per element, eight
elements per call.

    counter = (column >> 3, row, 0, 0)      key = (seed & 0xffffffff, seed >> 32)
    element (row, column) takes bits 16 * (column & 1) .. +15 of output word (column & 7) >> 1

Rows and columns are global: `origin` is the position of a shard or a micro-batch, so that random bits do not depend on
the layout. Compiled code splits products at 16 bits: int64 has no unsigned form, and its overflow is undefined in C++.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of a * constant, both operands below 2**32."""
    if not torch.compiler.is_compiling():  # eager kernels wrap around, and need a third of the passes
        product = a * constant
        return (product >> 32) & MASK, product & MASK
    low, high = (a & 0xFFFF) * constant, (a >> 16) * constant
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words (in int64) for each counter; all tensors broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        h0, l0 = _multiply(c0, MULTIPLIERS[0])
        h1, l1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def random_bits(seed: Tensor, origin: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return int32 [rows, columns] of uniform integers in [0, 65536).

    seed: 0-dim int64. origin: int64 [2], the global row and column of element (0, 0); the column a multiple of 8.
    """
    groups = -(-columns // 8)
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    group = torch.arange(groups, device=seed.device).unsqueeze(0)
    if origin is not None:
        row, group = row + origin[0], group + (origin[1] >> 3)
    zero = torch.zeros_like(group)
    words = torch.stack(torch.broadcast_tensors(*philox((group & MASK, row & MASK, zero, zero), seed)), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.flatten(1)[:, :columns].to(torch.int32)
