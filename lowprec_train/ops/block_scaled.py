"""GEMMs with block scales in the tensor cores: MXFP8, MXFP4 and NVFP4 on Blackwell, with one schema.

    a[m, k] @ b[n, k]^T = factor_a factor_b sum_blocks s_a[i, block] s_b[j, block] sum_block a[i, .] b[j, .]

Products of two codes and products of two scales are exact; sums are FP32, in an order that the hardware chooses.

Scales are bytes: E8M0 for 32 elements (MX) or E4M3 for 16 (NVFP4), in tiles of 128 rows and 4 blocks; cuBLAS 12.9, "1D
Block Scaling Factors Layout":

    offset(row, block) = 512 (tiles_k (row // 128) + block // 4) + 16 (row % 32) + 4 (row % 128 // 32) + block % 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.ops.reference import dequantize

BLOCKS = {"MXFP8": 32, "MXFP4": 32, "NVFP4": 16}
"""Format -> elements that share a scale."""

K_STEP, N_STEP = 32, 16  # the kernels need multiples of these
ROWS, COLUMNS = 128, 4  # scales in a tile
SWITCH = "precision.override.native_block_scales=false"


def swizzle(scale: Tensor) -> Tensor:
    """Reorder one-byte scales [rows, blocks] into a vector of tiles in the order above, padded with zeros."""
    rows, blocks = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -blocks % COLUMNS, 0, -rows % ROWS))
    tiles = padded.reshape(-(-rows // ROWS), 4, 32, -(-blocks // COLUMNS), COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the scales [rows, blocks] of `swizzle`'s output."""
    bytes = tiles.view(torch.uint8).reshape(-(-rows // ROWS), -(-blocks // COLUMNS), 32, 4, COLUMNS)
    matrix = bytes.permute(0, 3, 2, 1, 4).reshape(-(-rows // ROWS) * ROWS, -1)
    return matrix[:rows, :blocks].contiguous().view(tiles.dtype)


def e8m0(scale: Tensor) -> Tensor:
    """Convert FP32 powers of two from 2^-126 to 2^127 to E8M0; non-finite values become NaN."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def reference(  # type: ignore[no-untyped-def]
    a, scale_a, b, scale_b, factor_a, factor_b, format, dtype
):
    """Compute the formula above with FP32 sums, [m, n] in `dtype`.

    a [m, k], b [n, k]: codes in E4M3, row-major. scale_a, scale_b: one for each block of one or several rows: powers of
    two in FP32 (MX), or E4M3 (NVFP4). factor_a, factor_b: FP32 [1, 1], or None for 1 with MX. format: key of `BLOCKS`.
    """
    product = dequantize(a, scale_a.float()) @ dequantize(b, scale_b.float()).t()
    for factor in (factor_a, factor_b):
        product = product if factor is None else product * factor
    return product.to(dtype)


def block_scaled_mm(  # type: ignore[no-untyped-def]
    a, scale_a, b, scale_b, factor_a, factor_b, format, dtype
):
    """Compute `reference` on CUDA by torch's scaled_mm: cuBLASLt, or for MXFP4 CUTLASS, which only writes BF16."""
    left, right = _Operand.of(a, scale_a, factor_a, format), _Operand.of(b, scale_b, factor_b, format)
    after = [] if format == "NVFP4" else [each for each in (factor_a, factor_b) if each is not None]
    product = F.scaled_mm(
        left.codes,
        right.codes.t(),
        left.scales,
        left.scaling,
        right.scales,
        right.scaling,
        left.swizzles,
        right.swizzles,
        output_dtype=torch.bfloat16 if format == "MXFP4" else torch.float32 if after else dtype,
    )
    for factor in after:
        product = product * factor
    return product.to(dtype)


@dataclass(frozen=True)
class _Operand:
    """Operand of torch's scaled_mm: lists have an entry for the blocks, then for NVFP4 one for the tensor."""

    codes: Tensor
    scales: list[Tensor]
    scaling: list[F.ScalingType]
    swizzles: list[F.SwizzleType]

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, factor: Tensor | None, format: str) -> _Operand:
        if format != "MXFP8":
            codes = torch.ops.lowprec.pack_e2m1(codes).view(torch.float4_e2m1fn_x2)
        bytes = scale if scale.dtype == torch.float8_e4m3fn else e8m0(scale)
        each = bytes.view(torch.uint8).repeat_interleave(codes.shape[0] // scale.shape[0], 0).view(bytes.dtype)
        scales, swizzles = [swizzle(each)], [F.SwizzleType.SWIZZLE_32_4_4]
        if format != "NVFP4":
            return cls(codes, scales, [F.ScalingType.BlockWise1x32], swizzles)
        assert factor is not None
        levels = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        return cls(codes, [*scales, factor.reshape(())], levels, [*swizzles, F.SwizzleType.NO_SWIZZLE])
