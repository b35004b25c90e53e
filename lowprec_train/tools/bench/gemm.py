"""`lowprec bench gemm`: speed and exactness of tensor cores in each format.

Speeds are of the GEMM only, on codes of random data (zeros would draw less power and run faster). Exactness is the
error relative to FP64 products of the same codes, so only the error of the accumulator (`exactness.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.numerics.formats import E4M3, E5M2, INT8
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.ops import tensor_cores
from lowprec_train.tools.bench import exactness
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.timing import Clock

Shape = tuple[int, int, int]  # m, k, n
SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (16384, 4096, 4096),
    (16384, 4096, 11008),
    (16384, 11008, 4096),
    (16384, 2048, 5504),
)
TENSOR, ROW, LINE, SQUARE = (-1, -1), (1, -1), (1, 128), (128, 128)
Codes = tuple[Tensor, Tensor]


def measure(
    device: torch.device, *, shapes: Sequence[Shape] = SHAPES, clock: Clock | None = None, exact: bool = True
) -> dict[str, Any]:
    """Return `rows`: TFLOP/s by kind and shape, and `exactness`: error by case, reduction length and accumulation."""
    clock = clock or Clock(device)
    rows = [_row(clock, shape) for shape in shapes]
    return {"rows": rows, "exactness": exactness.measure(device) if exact else []}


def _row(clock: Clock, shape: Shape) -> dict[str, Any]:
    m, k, n = shape
    a, b = (torch.randn(rows, k, device=clock.device, dtype=torch.bfloat16) for rows in (m, n))
    tflops: dict[str, float] = {}
    errors: dict[str, str] = {}
    for name, make in kinds(a, b):
        try:
            tflops[name] = 2 * m * k * n / clock.median_ms([make()]) / 1e9
        except Exception as error:  # the GPU does not support this format
            errors[name] = cause(error)
    return {"shape": list(shape), "tflops": tflops, "errors": errors}


def kinds(a: Tensor, b: Tensor) -> Iterator[tuple[str, Callable[[], Callable[[], Tensor]]]]:
    """Yield (name, function that makes the operands of a[m, k] @ b[n, k]^T and returns the GEMM on them)."""
    yield "BF16", lambda: lambda: a @ b.t()
    for scaling, tile in (("tensor-wise", TENSOR), ("row-wise", ROW)):
        for name, fast in (("fast", True), ("split", False)):
            yield f"FP8 {scaling}, {name}", _scaled(a, b, tile, tile, fast=fast)
    for scaling, tile in (("tensor-wise", TENSOR), ("row-wise", ROW)):
        yield f"E5M2 x E4M3 {scaling}, fast", _scaled(a, b, tile, tile, fast=True, format_a=E5M2)
    yield "FP8 1x128 x 128x128", _scaled(a, b, LINE, SQUARE, fast=False)
    yield "INT8", _int8(a, b)


def _scaled(
    a: Tensor, b: Tensor, tile_a: tuple[int, int], tile_b: tuple[int, int], *, fast: bool, format_a: Any = E4M3
) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        left = Quantizer(format_a, tile=tile_a, scale=ScaleRule.POW2)(a)
        right = Quantizer(E4M3, tile=tile_b, scale=ScaleRule.POW2)(b)
        scale_a, scale_b = LAYOUTS[tile_a](left.scale), LAYOUTS[tile_b](right.scale)
        scale_b = scale_b.t() if tile_b == ROW else scale_b
        transposed = right.codes.t()
        how: Mapping[str, Any] = {"output_dtype": torch.bfloat16, "use_fast_accum": fast}
        types = (_type(tile_a), _type(tile_b))
        return lambda: F.scaled_mm(left.codes, transposed, scale_a, types[0], scale_b, types[1], **how)

    return make


def _type(tile: tuple[int, int]) -> Any:
    names = {TENSOR: "TensorWise", ROW: "RowWise", LINE: "BlockWise1x128", SQUARE: "BlockWise128x128"}
    return getattr(F.ScalingType, names[tile])


def _columns_first(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()


def _padded(scale: Tensor) -> Tensor:
    """Pad scales of 128 x 128 blocks: cuBLASLt reads them along k in groups of four."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).t()


LAYOUTS: Mapping[tuple[int, int], Callable[[Tensor], Tensor]] = {
    TENSOR: lambda scale: scale.reshape(()),
    ROW: lambda scale: scale.contiguous(),
    LINE: _columns_first,
    SQUARE: _padded,
}


def _int8(a: Tensor, b: Tensor) -> Callable[[], Callable[[], Tensor]]:
    def make() -> Callable[[], Tensor]:
        left, right = (Quantizer(INT8, tile=ROW)(each).codes for each in (a, b))
        return lambda: tensor_cores._int8_mm(left, right)

    return make
