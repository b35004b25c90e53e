"""FP8 and INT8 GEMMs on tensor cores with one schema: torch 2.11 cannot trace `F.scaled_mm` inside a graph, and it has
no public INT8 GEMM.

It can trace `aten::_scaled_mm`, which has scales per tensor and per row only. Inductor calls it directly, but an op of
ours through Python, which is half of the host's time for a GEMM; so `multiply` uses it for scales per tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def multiply(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, split_accumulation: bool, dtype: torch.dtype
) -> Tensor:
    """Return `lowprec::scaled_mm` of the arguments; for FP8 on a GPU with one scale per operand by `aten::_scaled_mm`,
    which calls the same GEMM of cuBLASLt.
    """
    if a.is_cuda and a.dtype != torch.int8 and scale_a.numel() == scale_b.numel() == 1:
        scales = scale_a.reshape(()), scale_b.reshape(())
        found: Tensor = torch.ops.aten._scaled_mm.default(a, b.t(), *scales, None, None, dtype, not split_accumulation)
        return found
    product: Tensor = torch.ops.lowprec.scaled_mm(a, scale_a, b, scale_b, split_accumulation, dtype)
    return product


def scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, split_accumulation: bool, dtype: torch.dtype
) -> Tensor:
    """Call cuBLASLt, with one scale per operand, per row, or per block; the last two only write BF16."""
    if a.dtype == torch.int8:
        return (_int8_mm(a, b) * scale_a * scale_b.t()).to(dtype)
    fast = not split_accumulation
    if scale_a.numel() == scale_b.numel() == 1:
        one = F.ScalingType.TensorWise
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        return F.scaled_mm(a, b.t(), scale_a, one, scale_b, one, output_dtype=dtype, use_fast_accum=fast)
    out = torch.bfloat16
    if scale_a.shape[1] > 1 or scale_b.shape[1] > 1:
        (scale_a, how_a), (scale_b, how_b) = _block_scales(a, scale_a), _block_scales(b, scale_b)
        return F.scaled_mm(a, b.t(), scale_a, how_a, scale_b, how_b, output_dtype=out, use_fast_accum=False).to(dtype)
    row = F.ScalingType.RowWise
    scale_a = scale_a.expand(a.shape[0], 1).contiguous()
    scale_b = scale_b.expand(b.shape[0], 1).contiguous().t()
    return F.scaled_mm(a, b.t(), scale_a, row, scale_b, row, output_dtype=out, use_fast_accum=fast).to(dtype)


def _block_scales(x: Tensor, scale: Tensor) -> tuple[Tensor, F.ScalingType]:
    """Return scales in the memory order of the kernel: 1x128 blocks column-major, 128x128 blocks padded to a multiple
    of four along k, and the scaling type.
    """
    if scale.shape[0] == x.shape[0]:
        return scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    padded = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return padded.t(), F.ScalingType.BlockWise128x128


def _int8_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a[m, k] @ b[n, k]^T with exact INT32 sums; the kernel needs more than 16 rows."""
    rows = a.shape[0]
    if rows <= 16:
        a = torch.cat([a, a.new_zeros((32 - rows, a.shape[1]))])
    return torch.ops.aten._int_mm(a, b.t())[:rows]
