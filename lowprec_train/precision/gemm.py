"""Choose the cheapest exact path for a pair of GEMM operands, and run it.

    bf16         neither operand is quantised
    fp8_tensor   FP8 tensor cores, one scale per operand (E2M1 is stored as E4M3)
    fp8_row      FP8 tensor cores, a scale per row of a and of b in the epilogue; also for folded blocks of the ladder
    fp8_block    FP8 tensor cores, a scale per 1x128 or 128x128 block in the main loop (compute capability 9.0)
    fp8_folded   power-of-two blocks of E2M1 folded into E5M2 / E4M3 carriers (docs/numerics.md), then as fp8_row
    mxfp8        block-scaled tensor cores on codes and scales (compute capability 10 and 12); also mxfp4 and nvfp4
    int8         integer tensor cores (FP64 on the CPU): sums are exact, scales in the epilogue
    dequantize   BF16 tensor cores (CUDA) or FP32 (CPU) on the exact values; CUDA: whole scales in the epilogue

There is no silent fallback: a layer's plan (`precision.plan`) names the path of every GEMM before the first step, and
`multiply` uses that path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.group import rounded
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import POWERS_OF_TWO, WHOLE, Quantized, Quantizer, ScaleRule
from lowprec_train.ops import cublas, tensor_cores
from lowprec_train.ops.block_scaled import BLOCKS, K_STEP, N_STEP
from lowprec_train.ops.ladder import BLOCK as LADDER_BLOCK
from lowprec_train.ops.reference import FOLD_SPAN, FP8, to_float
from lowprec_train.ops.rotated import BLOCK
from lowprec_train.precision.gemm_path import Path


@dataclass(frozen=True)
class Codes:
    """The properties of an operand that decide the path.

    dtype: of the codes; None: not quantised. granularity: of the scale, "tensor", "row" or "block". exponent_span:
    binades of a row's block scales, 0 if unbounded. tile: of a block. blocks: format of `ops.block_scaled` that
    represents codes and scales without change; "" for none.
    """

    dtype: torch.dtype | None
    granularity: str = "tensor"
    exponent_span: int = 0
    tile: tuple[int, int] = (0, 0)
    blocks: str = ""

    @property
    def carrier(self) -> str | None:
        """FP8 format of the codes in the tensor core; None if the block scales cannot be folded into them."""
        if self.granularity != "block":
            return "E5M2" if self.dtype is torch.float8_e5m2 else "E4M3"
        return carrier_of(self.exponent_span) if 0 < self.exponent_span <= FOLD_SPAN["E5M2"] else None


Capability = tuple[int, int] | None
"""Compute capability of a CUDA device; None for a device without tensor cores."""


def capability_of(device: torch.device) -> Capability:
    """Return the compute capability of a device. The meta device has 9.0, for estimates without a GPU."""
    if device.type == "meta":
        return 9, 0
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_fp8(capability: Capability) -> bool:
    """Return whether tensor cores support FP8."""
    return capability is not None and capability >= (8, 9)


def has_block_scales(capability: Capability) -> bool:
    """Return whether cuBLASLt supports FP32 block scales for FP8."""
    return capability == (9, 0)


def native_formats(capability: Capability) -> tuple[str, ...]:
    """Return the formats whose block scales the tensor cores apply. torch has MXFP4 only on data-center Blackwell."""
    major = 0 if capability is None else capability[0]
    return {10: ("MXFP8", "MXFP4", "NVFP4"), 12: ("MXFP8", "NVFP4")}.get(major, ())


LINE, SQUARE = (1, 128), (128, 128)
PRODUCT_BYTES = 64 * 2**20  # of the FP32 partial products that exist at a time


def choose(a: Codes, b: Codes, n: int, k: int, capability: Capability, *, m: int = 16, native: bool = True) -> Path:
    """Return the path of a[m, k] @ b[n, k]^T. native: False excludes block-scaled tensor cores.

    cuBLASLt does not support E5M2 x E5M2, FP8 dimensions that are not multiples of 16, and INT8 dimensions that are not
    multiples of 8.
    """
    if a.dtype is None and b.dtype is None:
        return Path.BF16
    if a.dtype is b.dtype is torch.int8 and "block" not in (a.granularity, b.granularity) and n % 8 == k % 8 == 0:
        return Path.INT8
    if native and is_native(a.blocks, b.blocks, n, k, capability):
        return BLOCK_SCALED[a.blocks]
    if not has_fp8(capability) or a.dtype not in FP8 or b.dtype not in FP8 or n % 16 or k % 16:
        return Path.DEQUANTIZE
    blocks = has_block_scales(capability)
    carriers = (a.carrier, b.carrier)
    if blocks and m % 4 == 0 and LINE in (a.tile, b.tile) and {a.tile, b.tile} <= {LINE, SQUARE} and None in carriers:
        return Path.DEQUANTIZE if a.dtype is b.dtype is torch.float8_e5m2 else Path.FP8_BLOCK
    if None in carriers or carriers == ("E5M2", "E5M2"):
        return Path.DEQUANTIZE
    if "block" in (a.granularity, b.granularity):
        return Path.FP8_FOLDED
    return Path.FP8_ROW if "row" in (a.granularity, b.granularity) else Path.FP8_TENSOR


def is_native(a: str, b: str, n: int, k: int, capability: Capability) -> bool:
    """Return whether block-scaled tensor cores multiply operands of these formats ("" for none) and sizes."""
    return a == b and a in native_formats(capability) and n % N_STEP == k % K_STEP == 0


def block_format(quantizer: Quantizer) -> str:
    """Return the format of `ops.block_scaled` that represents a quantiser's codes and scales; "" for none.

    torch multiplies E4M3 codes only as MXFP8, and accepts one FP32 factor per NVFP4 operand.
    """
    if quantizer.scale is ScaleRule.NVFP4:
        return "NVFP4" if quantizer.tile[1] == BLOCKS["NVFP4"] and quantizer.outer == WHOLE else ""
    mx = quantizer.scale in POWERS_OF_TWO and quantizer.tile[1] == BLOCKS["MXFP8"]
    return {"E4M3": "MXFP8", "E2M1": "MXFP4"}.get(quantizer.format.name, "") if mx else ""


def carrier_of(exponent_span: int) -> str:
    """Return the FP8 format that represents E2M1 codes times powers of two within `exponent_span` binades."""
    return "E4M3" if exponent_span <= FOLD_SPAN["E4M3"] else "E5M2"


def folds(quantizer: Quantizer) -> bool:
    """Return whether one op quantises and folds: `ops.rotated`, or `ops.ladder`."""
    if quantizer.scale is ScaleRule.LADDER:
        return quantizer.exponent_span > 0 and quantizer.tile == (1, LADDER_BLOCK)
    mx = quantizer.format is E2M1 and quantizer.tile == (1, BLOCK) and quantizer.scale in POWERS_OF_TWO
    return mx and 0 < quantizer.exponent_span <= FOLD_SPAN["E5M2"]


def reused_folded(quantizer: Quantizer) -> bool:
    """Return whether dgrad can reuse fprop's codes as E4M3 carriers: block scales fold, row scales go into dY."""
    mx = quantizer.format is E2M1 and quantizer.scale in POWERS_OF_TWO and quantizer.tile[0] == 1
    return mx and quantizer.tile[1] != -1 and 0 < quantizer.exponent_span <= FOLD_SPAN["E4M3"]


def codes_of(quantizer: Quantizer, rows: int, k: int, *, exponent_span: int) -> Codes:
    """Return the `Codes` of a matrix [rows, k] under a quantiser. exponent_span: binades of a row's block scales.

    Only E2M1 codes can be folded.
    """
    tall, wide = (size if each == -1 else each for each, size in zip(quantizer.tile, (rows, k), strict=True))
    dtype = quantizer.format.carrier
    if exponent_span and quantizer.scale is ScaleRule.LADDER:
        return Codes(dtype, "row")
    if (tall, wide) == (rows, k):
        return Codes(dtype)
    if exponent_span and quantizer.format is E2M1:
        return Codes(dtype, "block", exponent_span, blocks=block_format(quantizer))
    if (tall, wide) == (1, k):
        return Codes(dtype, "row")
    return Codes(dtype, "block", tile=(tall, wide), blocks=block_format(quantizer))


NARROW = (Path.FP8_ROW, Path.FP8_BLOCK, Path.FP8_FOLDED, Path.MXFP4)  # their kernels write BF16
BLOCK_SCALED = {"MXFP8": Path.MXFP8, "MXFP4": Path.MXFP4, "NVFP4": Path.NVFP4}  # by format


def multiply(
    a: Quantized | Tensor, b: Quantized | Tensor, path: Path, *, split_accumulation: bool, dtype: torch.dtype | None
) -> Tensor:
    """Return a[m, k] @ b[n, k]^T, [m, n], by a path from `choose`. dtype: of the result; None: the most precise
    that the path writes, FP32 or BF16.
    """
    if dtype is None:
        device = (b.codes if isinstance(b, Quantized) else b).device
        dtype = torch.bfloat16 if path in NARROW and device.type == "cuda" else torch.float32
    if path is Path.BF16:
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return rounded(a @ b.t(), dtype)
    a, b = _carried(a), _carried(b)
    if path is Path.DEQUANTIZE:
        return _dequantized(a, b, dtype)
    assert isinstance(a, Quantized) and isinstance(b, Quantized)
    if path.name in BLOCK_SCALED:
        (scale_a, factor_a), (scale_b, factor_b) = levels(a), levels(b)
        how = (scale_a, b.codes, scale_b, factor_a, factor_b, path.name, dtype)
        return torch.ops.lowprec.block_scaled_mm(a.codes, *how)
    if path is Path.FP8_FOLDED:
        a, b = _folded(a), _folded(b)
    return tensor_cores.multiply(a.codes, a.scale, b.codes, b.scale, split_accumulation, dtype)


def _carried(x: Quantized | Tensor) -> Quantized | Tensor:
    """Fold the blocks of ladder codes with row scales into FP8 carriers; return other operands unchanged."""
    if isinstance(x, Tensor) or "row" not in x.parts:
        return x
    parts = x.parts
    folded = torch.ops.lowprec.fold_ladder(x.codes, parts["block"], parts["row"], parts.get("factor"))
    return Quantized(*folded)


def _folded(x: Quantized) -> Quantized:
    if x.granularity != "block":
        return x
    return Quantized(*torch.ops.lowprec.fold(x.codes, x.scale, carrier_of(x.exponent_span)))


def _dequantized(a: Quantized | Tensor, b: Quantized | Tensor, dtype: torch.dtype) -> Tensor:
    (values_a, scale_a), (values_b, scale_b) = _exact(a), _exact(b)
    factors = [each for each in (scale_a, scale_b) if each is not None]
    if values_a.is_cuda and dtype in cublas.TYPES and all(each.numel() == 1 for each in factors):
        factor = torch.mul(*factors) if len(factors) == 2 else factors[0] if factors else None
        return torch.ops.lowprec.bf16_mm(_bf16(values_a), _bf16(values_b), factor, dtype)
    product = accumulate(values_a, values_b)
    if scale_a is not None:
        product = product * scale_a
    if scale_b is not None:
        product = product * scale_b.t()
    return rounded(product, dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`; x itself if it has this dtype.

    `Tensor.to` would return an alias. A compiled autograd Function whose output is an alias of another value silently
    loses its gradient (torch 2.11).
    """
    return x if x.dtype == dtype else x.to(dtype)


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """Return a[m, k] @ b[n, k]^T in FP32, [m, n]. The values must be exact in BF16."""
    if a.device.type == "cuda":
        return torch.mm(_bf16(a), _bf16(b).t(), out_dtype=torch.float32)
    return to_float(a) @ to_float(b).t()


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a[m, k] @ b[k, n], of BF16 or FP32, to total [m, n], FP32; by groups of rows, which bounds the memory."""
    rows = max(1, PRODUCT_BYTES // (4 * total.shape[1]))
    for into, part in zip(total.split(rows), a.split(rows), strict=True):
        into.add_(part @ b if a.dtype == torch.float32 else accumulate(part, b.t()))


def _exact(x: Quantized | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return values that are exact in BF16, and a scale [m or 1, 1] that is applied after the product.

    FP32 block scales are multiplied into the values.
    """
    if isinstance(x, Tensor):
        return x, None
    if x.granularity != "block":
        return x.codes, x.scale
    if "factor" in x.parts:
        return _values(x.codes, x.parts["block"]), x.parts["factor"]
    scale, rest = levels(x)
    return _values(x.codes, scale.float()), rest


def levels(x: Quantized) -> tuple[Tensor, Tensor | None]:
    """Return the block scales, E4M3 or powers of two if the scale rule has these, and the other factor [m or 1, 1]."""
    if "tensor" in x.parts:
        return x.parts["block"], x.parts["tensor"]
    if x.gain != 1.0:
        return _power_part(x.scale), torch.full((1, 1), x.gain, device=x.scale.device)
    return x.scale, None


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes * scale for `accumulate`: in BF16 on a GPU, which avoids an FP32 copy."""
    ops = torch.ops.lowprec
    return (ops.dequantize_bf16 if codes.device.type == "cuda" else ops.dequantize)(codes, scale)


def _power_part(scale: Tensor) -> Tensor:
    """Return 2**e of 2**e * gain, 1 <= gain < 2."""
    return (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


def _scales(quantizer: Quantizer, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scale of a matrix."""
    tall, wide = quantizer.tile
    return 1 if tall == -1 else rows // tall, 1 if wide == -1 else columns // wide


def one_scale(quantizer: Quantizer, rows: int, columns: int) -> bool:
    """Return whether the matrix has one scale."""
    return _scales(quantizer, rows, columns) == (1, 1)


def row_scales(quantizer: Quantizer, rows: int, columns: int) -> bool:
    """Return whether there are several rows with one scale each: along the reduction of the transposed matrix."""
    return _scales(quantizer, rows, columns) == (rows, 1) != (1, 1)
