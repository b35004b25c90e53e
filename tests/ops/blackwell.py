"""torch.nn.functional.scaled_mm of a Blackwell GPU, in FP64, with the conditions of its documentation and of its CUDA
sources: dtypes, layouts, numbers of scales. Written from the formats' definitions, without the package's code.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX, NV, ONE = ScalingType.BlockWise1x32, ScalingType.BlockWise1x16, ScalingType.TensorWise


def nibbles(packed: Tensor) -> Tensor:
    """FP64 of two E2M1 codes a byte, the low one first."""
    raw = packed.view(torch.uint8).long()
    pairs = torch.stack((raw % 16, raw // 16), -1).flatten(-2)
    values = torch.tensor((*FP4, *(-x for x in FP4)), dtype=torch.float64)
    return values[pairs]


def scales(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """FP64 [rows, blocks] of bytes in tiles of 128x4."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    tile = row // 128 * -(-blocks // 4) + block // 4
    offset = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    raw = flat.view(torch.uint8)[offset].view(flat.dtype)
    if flat.dtype == torch.float8_e4m3fn:
        return raw.float().double()
    exponent = raw.view(torch.uint8).double()
    return torch.where(exponent == 255, torch.nan, 2.0 ** (exponent - 127))


def operand(codes: Tensor, scale: list[Tensor], how: list[ScalingType], swizzles: list[SwizzleType]) -> Tensor:
    """codes [rows, k] or packed, row-major -> FP64 values."""
    assert codes.ndim == 2 and codes.stride(0) > codes.stride(1) == 1, f"codes are row-major, not {codes.stride()}"
    values = nibbles(codes) if codes.dtype == torch.float4_e2m1fn_x2 else codes.float().double()
    size = 32 if how[0] is MX else 16
    rows, blocks = values.shape[0], -(-values.shape[1] // size)
    count = -(-rows // 128) * 128 * -(-blocks // 4) * 4
    assert swizzles[0] is SwizzleType.SWIZZLE_32_4_4, f"scales of blocks are swizzled, not {swizzles[0]}"
    assert scale[0].numel() == count, f"{rows} rows of {blocks} blocks have {count} scales, not {scale[0].numel()}"
    assert scale[0].is_contiguous() and len(scale) == len(how) == len(swizzles)
    each = scales(scale[0], rows, blocks).repeat_interleave(size, 1)
    if how[0] is NV:
        assert scale[1].numel() == 1 and scale[1].dtype == torch.float32, "the tensor's scale is one FP32 number"
        each = each * scale[1].double()
    return values * each


def kernel(left: Tensor, right: Tensor, scale: list[Tensor], how: list[ScalingType]) -> str:
    """Which of torch's kernels takes these dtypes."""
    kinds = {left.dtype, right.dtype}
    if kinds == {torch.float8_e4m3fn} and how == [MX] and scale[0].dtype == torch.float8_e8m0fnu:
        return "MXFP8"
    if kinds == {torch.float4_e2m1fn_x2} and how == [MX] and scale[0].dtype == torch.float8_e8m0fnu:
        return "MXFP4"
    if kinds == {torch.float4_e2m1fn_x2} and how == [NV, ONE] and scale[0].dtype == torch.float8_e4m3fn:
        return "NVFP4"
    raise AssertionError(f"no kernel of torch takes {kinds} with {how} in {scale[0].dtype}")


def scaled_mm(  # type: ignore[no-untyped-def]
    mat_a,
    mat_b,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    swizzle_a=None,
    swizzle_b=None,
    *,
    output_dtype,
) -> Tensor:
    """mat_a [m, k] @ mat_b [k, n] as torch's function of this name, column-major mat_b."""
    names = {kernel(mat_a, mat_b, scale, how) for scale, how in ((scale_a, scale_recipe_a), (scale_b, scale_recipe_b))}
    assert len(names) == 1, f"no kernel of torch takes {names}"
    writes = (torch.bfloat16,) if names == {"MXFP4"} else (torch.bfloat16, torch.float32)
    assert output_dtype in writes, f"{names} writes {writes}, not {output_dtype}"
    right = mat_b.t()
    assert mat_a.shape[1] == right.shape[1] and mat_a.shape[1] % 16 == right.shape[0] % 16 == 0
    left = operand(mat_a, scale_a, scale_recipe_a, swizzle_a)
    product = left @ operand(right, scale_b, scale_recipe_b, swizzle_b).t()
    return product.to(output_dtype)
