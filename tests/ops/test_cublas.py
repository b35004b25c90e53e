"""What `bf16_mm` asks of cuBLAS, by a BLAS of this test that follows its documentation on a CPU's memory."""

import ctypes

import pytest
import torch

from lowprec_train.ops import cublas, kernels, self_test
from lowprec_train.ops.cases import cases

DTYPES = {number: dtype for dtype, number in cublas.TYPES.items()}
IN_C = {torch.bfloat16: ctypes.c_uint16, torch.float32: ctypes.c_float}
DEFAULT_MATH = 0


def memory(pointer: int, dtype: torch.dtype, rows: int, columns: int, step: int) -> torch.Tensor:
    """The matrix in columns at an address, `step` elements from one column to the next."""
    buffer = (IN_C[dtype] * (step * (columns - 1) + rows)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype).as_strided((rows, columns), (1, step))


class Blas:
    """cublasGemmEx with its modes. status: that it returns."""

    def __init__(self, status: int = cublas.SUCCESS):
        self.mode, self.math, self.status, self.calls = cublas.HOST, DEFAULT_MATH, status, 0

    def cublasSetPointerMode_v2(self, handle, mode):
        self.mode = mode
        return cublas.SUCCESS

    def cublasSetMathMode(self, handle, mode):
        self.math = mode
        return cublas.SUCCESS

    def cublasGemmEx(
        self, handle, left, right, m, n, k, alpha, a, of_a, step_a, b, of_b, step_b, beta, c, of_c, step_c, sums, how
    ):
        assert (self.math, sums, how) == (cublas.NO_REDUCTION_IN_BF16, cublas.FP32_SUMS, cublas.HEURISTIC)
        self.calls += 1
        a = memory(a, DTYPES[of_a], *((k, m) if left else (m, k)), step_a).float()
        b = memory(b, DTYPES[of_b], *((n, k) if right else (k, n)), step_b).float()
        scale, old = (ctypes.c_float.from_address(each).value for each in (alpha, beta))
        assert old == 0.0
        product = (a.t() if left else a) @ (b.t() if right else b)
        memory(c, DTYPES[of_c], m, n, step_c).copy_(product * scale)
        return self.status


@pytest.fixture
def blas(monkeypatch):
    made = Blas()
    monkeypatch.setattr(cublas, "library", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    return made


@pytest.mark.parametrize("case", cases("bf16_mm"))
def test_cublas_is_asked_for_the_reference(blas, case):
    """All layouts that are passed as they lie, and those that are copied first."""
    a, b, factor, dtype = cases("bf16_mm")[case]
    out = torch.full((len(a), len(b)), torch.nan, dtype=dtype)
    cublas._gemm(out, a, b, factor)
    assert torch.equal(out.nan_to_num(7), cublas.reference(a, b, factor, dtype).nan_to_num(7))
    assert blas.calls == 1 and blas.mode == cublas.HOST, "torch passes its factors in host memory"


def test_an_exception_leaves_the_mode_that_torch_expects(blas, monkeypatch):
    def interrupted(*arguments):
        assert blas.mode == cublas.DEVICE
        raise KeyboardInterrupt

    monkeypatch.setattr(blas, "cublasGemmEx", interrupted, raising=True)
    with pytest.raises(KeyboardInterrupt):
        cublas._gemm(torch.empty(48, 32), *cases("bf16_mm")["to FP32"][:3])
    assert blas.mode == cublas.HOST


def test_a_wrong_gemm_is_found_at_the_start(monkeypatch):
    monkeypatch.setattr(self_test.torch.ops.lowprec, "bf16_mm", lambda *given: cublas.reference(*given) * 2)
    with pytest.raises(
        kernels.KernelError, match="the GEMM of torch's cuBLAS of lowprec::bf16_mm on cpu, case 'to BF16'"
    ):
        self_test.self_test(torch.device("cpu"), (), decoded=True)


def test_an_error_of_cublas_has_its_status_and_the_sizes(blas):
    blas.status = 13
    a, b, factor, dtype = cases("bf16_mm")["to BF16"]
    with pytest.raises(RuntimeError, match=r"cuBLAS: status 13 for \[48, 64\] by \[32, 64\] to torch.bfloat16"):
        cublas._gemm(torch.empty(48, 32, dtype=dtype), a, b, factor)
    assert blas.mode == cublas.HOST


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({0: torch.zeros(48, 64)}, "BF16 to BF16 or FP32, not torch.float32 and torch.bfloat16 to torch.bfloat16"),
        ({3: torch.float16}, "not torch.bfloat16 and torch.bfloat16 to torch.float16"),
        ({1: torch.zeros(32, 48).bfloat16()}, r"\[48, 64\] and \[32, 48\] are not \[m, k\] and \[n, k\]"),
        ({0: torch.zeros(2, 48, 64).bfloat16()}, r"\[2, 48, 64\] and \[32, 64\] are not"),
        ({2: torch.ones(48, 1)}, r"one factor in FP32, not torch.float32 \[48, 1\]"),
        ({2: torch.ones(1, 1).bfloat16()}, r"one factor in FP32, not torch.bfloat16 \[1, 1\]"),
        ({1: torch.zeros(32, 64, device="meta").bfloat16()}, "meta or the factor is another device than cpu"),
    ],
)
def test_bad_input(change, said):
    arguments = [change.get(place, each) for place, each in enumerate(cases("bf16_mm")["to BF16"])]
    with pytest.raises(ValueError, match=said):
        cublas.bf16_mm(*arguments)
