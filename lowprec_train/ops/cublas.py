"""BF16 GEMMs with a factor that lies in device memory.

torch's `mm` takes none, so its product would be written in FP32, read, multiplied and written again. Here the factor
multiplies the FP32 sum, which is rounded once, in the GEMM's epilogue. torch's own cuBLAS and handle are used, so
stream, workspace and recording are those of `mm`. Sources: cuBLAS, `cublasGemmEx` and `cublasSetPointerMode`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch
from torch import Tensor

SUCCESS = 0
KEPT, TRANSPOSED = 0, 1  # cublasOperation_t
HOST, DEVICE = 0, 1  # cublasPointerMode_t: where the factors lie
FP32_SUMS = 68  # cublasComputeType_t
HEURISTIC = -1  # cublasGemmAlgo_t
NO_REDUCTION_IN_BF16 = 16  # cublasMath_t: sums of parts of k are FP32 too
TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType_t
LARGEST = 2**31 - 1  # sizes and steps are C ints


@cache
def library() -> ctypes.CDLL | None:
    """Return the cuBLAS that torch has loaded; None if there is none of its CUDA version."""
    try:
        name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
        found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # another cuBLAS must not get torch's handle
    except OSError:
        return None
    number, pointer = ctypes.c_int, ctypes.c_void_p
    found.cublasSetPointerMode_v2.argtypes = found.cublasSetMathMode.argtypes = (pointer, number)
    matrix = (pointer, number, number)
    found.cublasGemmEx.argtypes = (pointer, *(number,) * 5, pointer, *matrix * 2, pointer, *matrix, number, number)
    return found


def reference(a, b, factor, dtype):  # type: ignore[no-untyped-def]
    """Return a[m, k] @ b[n, k]^T * factor, [m, n] in `dtype`, with FP32 sums. a, b: BF16. factor: FP32 [1, 1], or None
    for 1. dtype: FP32 or BF16.
    """
    product = a.float() @ b.float().t()
    return (product if factor is None else product * factor).to(dtype)


def bf16_mm(a: Tensor, b: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute `reference` on a GPU by cuBLAS, or by `mm` and a multiplication where torch's cuBLAS is not found.
    Raises ValueError for other dtypes, sizes and devices, and RuntimeError with cuBLAS's status.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or dtype not in TYPES:
        raise ValueError(f"bf16_mm multiplies BF16 to BF16 or FP32, not {a.dtype} and {b.dtype} to {dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"bf16_mm: {list(a.shape)} and {list(b.shape)} are not [m, k] and [n, k]")
    if factor is not None and (factor.numel() != 1 or factor.dtype != torch.float32):
        raise ValueError(f"bf16_mm takes one factor in FP32, not {factor.dtype} {list(factor.shape)}")
    if {a.device} != {each.device for each in (a, b, factor) if each is not None}:
        raise ValueError(f"bf16_mm: {b.device} or the factor is another device than {a.device}")
    (m, k), n = a.shape, b.shape[0]
    if library() is None or 0 in (m, n, k) or max(m, n, k, *a.stride(), *b.stride()) > LARGEST:
        product = torch.mm(a, b.t(), out_dtype=torch.float32)
        return (product if factor is None else product * factor).to(dtype)
    out = a.new_empty((m, n), dtype=dtype)
    with torch.cuda.device(a.device):
        _gemm(out, a, b, factor)
    return out


def _gemm(out: Tensor, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """Write a @ b^T to `out`. cuBLAS has columns where we have rows, so it computes out^T = b @ a^T."""
    (m, n), k, cublas = out.shape, a.shape[1], library()
    assert cublas is not None
    (b, by_rows_b, step_b), (a, by_rows_a, step_a) = _steps(b), _steps(a)
    one, none = ctypes.c_float(1.0), ctypes.c_float(0.0)
    alpha, beta, where = ctypes.addressof(one), ctypes.addressof(none), HOST
    if factor is not None:
        scalars = torch.nn.functional.pad(factor.reshape(1), (0, 1))  # the factor of the product, and 0 of `out`
        alpha, beta, where = scalars.data_ptr(), scalars.data_ptr() + scalars.element_size(), DEVICE
    handle = torch.cuda.current_blas_handle()  # its stream is now the current one
    try:
        status = cublas.cublasSetMathMode(handle, NO_REDUCTION_IN_BF16) or cublas.cublasSetPointerMode_v2(handle, where)
        status = status or cublas.cublasGemmEx(
            *(handle, TRANSPOSED if by_rows_b else KEPT, KEPT if by_rows_a else TRANSPOSED, n, m, k, alpha),
            *(b.data_ptr(), TYPES[b.dtype], step_b, a.data_ptr(), TYPES[a.dtype], step_a),
            *(beta, out.data_ptr(), TYPES[out.dtype], n, FP32_SUMS, HEURISTIC),
        )
    finally:
        cublas.cublasSetPointerMode_v2(handle, HOST)  # as torch expects; it sets the other mode before each GEMM
    if status != SUCCESS:
        raise RuntimeError(f"cuBLAS: status {status} for [{m}, {k}] by [{n}, {k}] to {out.dtype}")


def _steps(x: Tensor) -> tuple[Tensor, bool, int]:
    """Return (the matrix, whether its rows are contiguous and not its columns, elements between them)."""
    rows, columns = x.shape
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return x, True, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return x, False, x.stride(1)
    return x.contiguous(), True, columns
