"""Exponent fields of FP32 numbers by integer operations: exact, unlike a logarithm, which errs just below powers of
two."""

from __future__ import annotations

import torch
from torch import Tensor


def exponent(x: Tensor) -> Tensor:
    """Return floor(log2 |x|) as int32; -127 for zeros and subnormals, 128 for Inf and NaN."""
    return ((x.contiguous().view(torch.int32) >> 23) & 255) - 127


def exp2_int(e: Tensor) -> Tensor:
    """Return 2**e for int32 e in [-126, 127], exactly."""
    return ((e + 127) << 23).view(torch.float32)
