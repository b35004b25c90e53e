"""Picks the cheapest exact execution for a pair of operands, and says which.

    bf16         neither operand is quantised
    fp8_tensor   FP8 tensor cores, one scale an operand (E2M1 rides as E4M3)
    fp8_row      FP8 tensor cores, a scale per row of a and of b in the epilogue
    fp8_block    FP8 tensor cores, a scale per 1x128 or 128x128 block in the main loop (compute capability 9.0)
    fp8_folded   power-of-two blocks of E2M1 folded into E5M2 / E4M3 carriers (docs/numerics.md), then as fp8_row
    int8         integer tensor cores (FP64 on the CPU): sums are exact, scales in the epilogue
    dequantize   BF16 tensor cores (CUDA) or FP32 (CPU) on the exact values, scales outside the product where possible

Nothing falls back silently: `execution` tells the path of every GEMM of a layer before the first step, by the same rule
that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import POWERS_OF_TWO, Quantized, Quantizer
from lowprec_train.ops.reference import FOLD_SPAN, FP8, to_float
from lowprec_train.ops.rotated import BLOCK
from lowprec_train.precision.recipe import LinearRecipe, Reuse


class Path(Enum):
    """How a GEMM runs."""

    BF16 = "bf16"
    FP8_TENSOR = "fp8_tensor"
    FP8_ROW = "fp8_row"
    FP8_FOLDED = "fp8_folded"
    FP8_BLOCK = "fp8_block"
    INT8 = "int8"
    DEQUANTIZE = "dequantize"


@dataclass(frozen=True)
class Operand:
    """What the choice depends on: the codes' dtype (None: not quantised), the scale's granularity, the span that allows
    folding, the tile of a block.
    """

    dtype: torch.dtype | None
    granularity: str = "tensor"
    span: int = 0
    tile: tuple[int, int] = (0, 0)


def has_fp8(device: torch.device) -> bool:
    """True on CUDA devices with FP8 tensor cores (compute capability 8.9 and up), and on the meta device, which stands
    for compute capability 9.0 where memory and arithmetic are counted before there is a GPU.
    """
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def has_block_scales(device: torch.device) -> bool:
    """True where cuBLASLt scales FP8 by blocks of FP32 numbers (compute capability 9.0)."""
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0))


LINE, SQUARE = (1, 128), (128, 128)


def choose(a: Operand, b: Operand, n: int, k: int, fp8: bool, *, m: int = 16, blocks: bool = False) -> Path:
    """The path of a[m, k] @ b[n, k]^T. fp8, blocks: what the device has. cuBLASLt refuses E5M2 x E5M2, FP8 dimensions
    that are no multiples of 16 and INT8 ones that are none of 8.
    """
    if a.dtype is None and b.dtype is None:
        return Path.BF16
    if a.dtype is b.dtype is torch.int8 and "block" not in (a.granularity, b.granularity) and n % 8 == k % 8 == 0:
        return Path.INT8
    if not fp8 or a.dtype not in FP8 or b.dtype not in FP8 or n % 16 or k % 16:
        return Path.DEQUANTIZE
    if blocks and m % 4 == 0 and LINE in (a.tile, b.tile) and {a.tile, b.tile} <= {LINE, SQUARE} and _unfoldable(a, b):
        return Path.DEQUANTIZE if a.dtype is b.dtype is torch.float8_e5m2 else Path.FP8_BLOCK
    if _carrier(a) == _carrier(b) == "E5M2" or _unfoldable(a, b):
        return Path.DEQUANTIZE
    if "block" in (a.granularity, b.granularity):
        return Path.FP8_FOLDED
    return Path.FP8_ROW if "row" in (a.granularity, b.granularity) else Path.FP8_TENSOR


def _unfoldable(a: Operand, b: Operand) -> bool:
    return None in (_carrier(a), _carrier(b))


def _carrier(operand: Operand) -> str | None:
    """The FP8 format an operand enters the tensor core in; None when its blocks do not fold."""
    if operand.granularity != "block":
        return "E5M2" if operand.dtype is torch.float8_e5m2 else "E4M3"
    return carrier_of(operand.span) if 0 < operand.span <= FOLD_SPAN["E5M2"] else None


def carrier_of(span: int) -> str:
    """The FP8 format that holds E2M1 codes times the powers of two of `span` binades."""
    return "E4M3" if span <= FOLD_SPAN["E4M3"] else "E5M2"


def folds(quantizer: Quantizer) -> bool:
    """True when `ops.rotated` makes the quantiser's codes and folds them."""
    mx = quantizer.format is E2M1 and quantizer.tile == (1, BLOCK) and quantizer.scale in POWERS_OF_TWO
    return mx and 0 < quantizer.span <= FOLD_SPAN["E5M2"]


def _operand(x: Quantized | Tensor) -> Operand:
    if not isinstance(x, Quantized):
        return Operand(None)
    if x.span and x.granularity != "tensor":  # folded, or to be folded
        return Operand(x.codes.dtype, "block", x.span)
    tile = (x.codes.shape[0] // x.scale.shape[0], x.codes.shape[1] // x.scale.shape[1])
    return Operand(x.codes.dtype, x.granularity, tile=tile if x.granularity == "block" else (0, 0))


NARROW = (Path.FP8_ROW, Path.FP8_BLOCK, Path.FP8_FOLDED)  # their kernels write BF16


def multiply(
    a: Quantized | Tensor, b: Quantized | Tensor, *, split_accumulation: bool, dtype: torch.dtype | None
) -> Tensor:
    """a[m, k] @ b[n, k]^T -> [m, n], each operand quantised or a plain tensor. dtype: None for the most precise one
    that the path writes, FP32 or BF16.
    """
    operand_a, operand_b = _operand(a), _operand(b)
    codes = b.codes if isinstance(b, Quantized) else b
    (n, k), device = codes.shape, codes.device
    m = a.codes.shape[0] if isinstance(a, Quantized) else a.shape[0]
    path = choose(operand_a, operand_b, n, k, has_fp8(device), m=m, blocks=has_block_scales(device))
    if dtype is None:
        dtype = torch.bfloat16 if path in NARROW and device.type == "cuda" else torch.float32
    if path is Path.BF16:
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        return cast(a @ b.t(), dtype)
    if path is Path.DEQUANTIZE:
        return _dequantized(a, b, dtype)
    assert isinstance(a, Quantized) and isinstance(b, Quantized)
    if path is not Path.FP8_BLOCK:
        a, b = _folded(a, operand_a), _folded(b, operand_b)
    return torch.ops.lowprec.scaled_mm(a.codes, a.scale, b.codes, b.scale, split_accumulation, dtype)


def _folded(x: Quantized, operand: Operand) -> Quantized:
    if operand.granularity != "block" or x.granularity != "block":
        return x
    return Quantized(*torch.ops.lowprec.fold(x.codes, x.scale, _carrier(operand)))


def _dequantized(a: Quantized | Tensor, b: Quantized | Tensor, dtype: torch.dtype) -> Tensor:
    (values_a, scale_a), (values_b, scale_b) = _exact(a), _exact(b)
    product = accumulate(values_a, values_b)
    if scale_a is not None:
        product = product * scale_a
    if scale_b is not None:
        product = product * scale_b.t()
    return cast(product, dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`, and x itself where that is its own.

    `Tensor.to` would return an alias there, and a compiled autograd Function whose output is an alias of another value
    loses its gradient without a word (torch 2.11).
    """
    return x if x.dtype == dtype else x.to(dtype)


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """a[m, k] @ b[n, k]^T in FP32 [m, n], of values that BF16 holds."""
    if a.device.type == "cuda":
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16).t(), out_dtype=torch.float32)
    return to_float(a) @ to_float(b).t()


def _exact(x: Quantized | Tensor) -> tuple[Tensor, Tensor | None]:
    """(values that BF16 holds exactly, scale outside the product [m or 1, 1]); FP32 block scales alone have to be
    multiplied in.
    """
    if isinstance(x, Tensor):
        return x, None
    if x.granularity != "block":
        return x.codes, x.scale
    if "tensor" in x.parts:
        return torch.ops.lowprec.dequantize(x.codes, x.parts["block"].float()), x.parts["tensor"]
    if x.gain != 1.0:
        return torch.ops.lowprec.dequantize(x.codes, _power_part(x.scale)), torch.full(
            (1, 1), x.gain, device=x.scale.device
        )
    return x.dequantize(), None


def _power_part(scale: Tensor) -> Tensor:
    """The power of two in 2**e * gain, 1 <= gain < 2."""
    return (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)


MANY = 1 << 20  # tokens: longer than any block, so that a block of them is not taken for a row


def execution(recipe: LinearRecipe, in_features: int, out_features: int, device: torch.device) -> dict[str, str]:
    """The path of each GEMM of a linear layer on a device, by the rule that `multiply` follows; tokens are taken to be
    many, and a multiple of 16.
    """
    fp8, blocks = has_fp8(device), has_block_scales(device)
    weight, x = _planned(recipe.fprop.b, out_features, in_features), _planned(recipe.fprop.a, MANY, in_features)
    reused = {"dgrad": _turned(weight), "wgrad": _turned(x)}
    sizes = {
        "fprop": (MANY, out_features, in_features),
        "dgrad": (MANY, in_features, out_features),
        "wgrad": (out_features, in_features, MANY),
    }
    paths = {}
    for name, gemm in recipe.gemms().items():
        m, n, k = sizes[name]
        a, b = _planned(gemm.a, m, k), reused[name] if isinstance(gemm.b, Reuse) else _planned(gemm.b, n, k)
        paths[name] = (Path.BF16 if gemm.codes_only else choose(a, b, n, k, fp8, m=m, blocks=blocks)).value
    return paths


def _planned(quantizer: Quantizer | Reuse | None, rows: int, k: int) -> Operand:
    """The operand that a quantiser will make of a matrix [rows, k]."""
    if not isinstance(quantizer, Quantizer):
        return Operand(None)
    high, wide = quantizer.tile[0] in (-1, rows), quantizer.tile[1] in (-1, k)
    granularity = "tensor" if high and wide else "row" if wide and quantizer.tile[0] == 1 else "block"
    if quantizer.span and granularity != "tensor":
        return Operand(quantizer.format.carrier, "block", quantizer.span)
    tile = quantizer.tile if granularity == "block" else (0, 0)
    return Operand(quantizer.format.carrier, granularity, tile=tile)


def _turned(codes: Operand) -> Operand:
    """Codes of fprop in a backward GEMM: a row scale lies along k there and is folded into the other operand, blocks
    change their direction.
    """
    block = codes.granularity == "block"
    return Operand(codes.dtype, "block" if block else "tensor", tile=(codes.tile[1], codes.tile[0]))


def peak_kind(path: str) -> str:
    """Which of the device's peaks a path is measured against: "bf16", "fp8" or "int8"."""
    return "int8" if path == Path.INT8.value else "fp8" if path.startswith("fp8") else "bf16"
