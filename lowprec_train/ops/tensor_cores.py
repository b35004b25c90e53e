"""The FP8 and INT8 GEMMs of the tensor cores, behind our own schema: torch 2.11 cannot trace the public form of the FP8
one inside a graph, and the INT8 one has no public form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, split_accumulation: bool, dtype: torch.dtype
) -> Tensor:
    """cuBLASLt, with one scale an operand or one per row; the FP8 row-wise kernel writes BF16 only."""
    if a.dtype == torch.int8:
        return (_int8_mm(a, b) * scale_a * scale_b.t()).to(dtype)
    fast = not split_accumulation
    if scale_a.numel() == scale_b.numel() == 1:
        one = F.ScalingType.TensorWise
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        return F.scaled_mm(a, b.t(), scale_a, one, scale_b, one, output_dtype=dtype, use_fast_accum=fast)
    row = F.ScalingType.RowWise
    scale_a = scale_a.expand(a.shape[0], 1).contiguous()
    scale_b = scale_b.expand(b.shape[0], 1).contiguous().t()
    out = torch.bfloat16
    return F.scaled_mm(a, b.t(), scale_a, row, scale_b, row, output_dtype=out, use_fast_accum=fast).to(dtype)


def _int8_mm(a: Tensor, b: Tensor) -> Tensor:
    """a[m, k] @ b[n, k]^T with exact INT32 sums; the kernel wants more than 16 rows."""
    rows = a.shape[0]
    if rows <= 16:
        a = torch.cat([a, a.new_zeros((32 - rows, a.shape[1]))])
    return torch.ops.aten._int_mm(a, b.t())[:rows]
