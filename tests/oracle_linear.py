"""What a linear of every recipe should return, y = x w^T, dx = dy w, dw = dy^T x, from the numbers of tests/oracle.py.

NumPy in FP64, written from docs/numerics.md and the papers it names. Nothing here may import the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.oracle import (
    F32,
    bf16,
    body,
    by_inverse,
    carrier_codes,
    clipped,
    quantize,
    random_bits,
    rotate_float32,
    slope,
)


@dataclass(frozen=True)
class Product:
    """a @ b^T in FP64, and the same of magnitudes, which bounds what an FP32 sum may lose."""

    value: np.ndarray
    magnitude: np.ndarray
    k: int

    def __add__(self, other: Product) -> Product:
        return Product(self.value + other.value, self.magnitude + other.magnitude, self.k + other.k)

    def __mul__(self, factor: np.ndarray) -> Product:
        return Product(self.value * factor, self.magnitude * np.abs(factor), self.k)


def gemm(a: np.ndarray, b: np.ndarray) -> Product:
    """a [m, k] @ b [n, k]^T"""
    return Product(a @ b.T, np.abs(a) @ np.abs(b).T, a.shape[1])


@dataclass(frozen=True)
class Passes:
    """What a linear returns: y, dX and dW (the weight's FP32)."""

    y: Product
    dx: Product
    dw: Product


Seeds = Callable[[int, int], int]  # (gemm, purpose) -> seed
FPROP, DGRAD, WGRAD = 0, 1, 2
ROTATION, A, B = 0, 1, 2


def plain(x: np.ndarray, format: str) -> np.ndarray:
    """An unquantised operand in the dtype of its GEMM."""
    return bf16(x) if format == "BF16" else x


def linear_plain(x: np.ndarray, w: np.ndarray, dy: np.ndarray, format: str = "BF16") -> Passes:
    w = plain(w, format)
    return Passes(gemm(x, w), gemm(dy, w.T), gemm(dy.T, x.T))


def linear_fp8(x: np.ndarray, w: np.ndarray, dy: np.ndarray, gradient: str = "E5M2", format: str = "BF16") -> Passes:
    """format: of the unquantised linear. The weight is rounded to it before anything else, here and below."""
    qx = quantize(x, "E4M3", rule="POW2").exact
    qw = quantize(plain(w, format), "E4M3", rule="POW2").exact
    qdy = quantize(dy, gradient, rule="POW2").exact
    return Passes(gemm(qx, qw), gemm(qdy, qw.T), gemm(qdy.T, qx.T))


def linear_fp4(
    x: np.ndarray,
    w: np.ndarray,
    dy: np.ndarray,
    alpha: float = 0.99,
    variant: str = "carrier",
    gradient: str = "E5M2",
    k: float = 5.0,
    cap: float = 3.0,
    format: str = "BF16",
) -> Passes:
    """format: also of the residual's GEMMs, R W^T and dY^T R."""
    w = plain(w, format)
    clamped = body(x, alpha)
    if variant == "carrier":
        qx = carrier_codes(x, clipped(alpha, x.shape[1]))
    else:
        qx = quantize(clamped, "E2M1", (1, -1))
    qw = quantize(w, "E2M1", (1, -1))
    y = gemm(qx.exact, qw.exact)
    dx = gemm(_folded_gradient(dy, qw.scale, gradient), qw.values.T)
    dw = gemm(_folded_gradient(dy.T, qx.scale, gradient), qx.values.T)
    if variant == "residual":
        residual = plain(x - clamped, format)
        y = y + gemm(residual, w)
        dw = dw + gemm(dy.T, residual.T)
    return Passes(y, dx, dw * slope(by_inverse(w, qw.scale), k, cap))


def _folded_gradient(dy: np.ndarray, scale: np.ndarray, format: str) -> np.ndarray:
    """Q(dY * s), s along the reduction, one scale a row."""
    return quantize(dy.astype(F32) * scale.T, format, (1, -1)).exact


@dataclass(frozen=True)
class MX:
    """The backward GEMMs of MXFP4: seeds by (gemm, purpose), the micro-batch's first token, the Hadamard block (0:
    none), and nearest rounding under the ceil rule when not stochastic."""

    seeds: Seeds
    first_token: int = 0
    rotation: int = 64
    stochastic: bool = True

    def operand(
        self, x: np.ndarray, which: int, purpose: int, span: int, origin: tuple[int, int] = (0, 0)
    ) -> np.ndarray:
        if self.rotation:
            x = rotate_float32(x, self.seeds(which, ROTATION), self.rotation)
        if not self.stochastic:
            return quantize(x, "E2M1", (1, 32), "E8M0_CEIL", span=span).exact
        bits = random_bits(self.seeds(which, purpose), *x.shape, origin)
        return quantize(x, "E2M1", (1, 32), "E8M0_FLOOR", 3 / 4, span, bits).exact

    def dx(self, dy: np.ndarray, w: np.ndarray) -> Product:
        return gemm(self.operand(dy, DGRAD, A, 28, (self.first_token, 0)), self.operand(w.T, DGRAD, B, 14))

    def dw(self, dy: np.ndarray, x: np.ndarray) -> Product:
        columns = (0, self.first_token)
        return gemm(self.operand(dy.T, WGRAD, A, 28, columns), self.operand(x.T, WGRAD, B, 14, columns))


def linear_mxfp4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, mx: MX, format: str = "BF16") -> Passes:
    w = plain(w, format)
    return Passes(gemm(x, w), mx.dx(dy, w), mx.dw(dy, x))


def linear_mxfp4_fp8(x: np.ndarray, w: np.ndarray, dy: np.ndarray, mx: MX, format: str = "BF16") -> Passes:
    """wgrad rounds the E4M3 codes of X that fprop kept."""
    kept = quantize(x, "E4M3", rule="POW2").exact
    return Passes(linear_fp8(x, w, dy, format=format).y, mx.dx(dy, plain(w, format)), mx.dw(dy, kept))
