"""What a linear of the recipes that tests/oracle_linear.py leaves out should return, in FP64.

Written from the equations that open each recipe's file and the papers they name, with the numbers of tests/oracle.py: a
GEMM a @ b^T rounds each operand along its own k, unless it says that it takes fprop's codes. Nothing here may import
the package.

    dY_R  [tokens, out]      W_T [in, out]      dY_T [out, tokens]      X_T [in, tokens]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.oracle import F32, F64, TABLES, bf16, fold, quantize, random_bits, rotate_float32
from tests.oracle_eden import eden
from tests.oracle_four_over_six import four_over_six
from tests.oracle_ladder import ladder, rotate_half
from tests.oracle_linear import DGRAD, FPROP, ROTATION, WGRAD, A, B, Passes, Product, Seeds, gemm, plain


def linear_fp8_rowwise(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, gradient: str = "E4M3", format: str = "BF16"
) -> Passes:
    """A power-of-two scale for each row of all six operands, each made anew from the unquantised matrix."""
    w = plain(w, format)

    def rows(matrix: np.ndarray, name: str = "E4M3") -> np.ndarray:
        return quantize(matrix, name, (1, -1), "POW2").exact

    return Passes(
        gemm(rows(x), rows(w)),
        gemm(rows(dy, gradient), rows(w.T)),
        gemm(rows(dy.T, gradient), rows(x.T)),
    )


def few_bits(x: np.ndarray, mantissa_bits: int, rounding: str = "truncate") -> np.ndarray:
    """x in FP32 with the other bits of its mantissa cut off, or rounded to the nearest, ties to even: on the integers
    that the bits are."""
    bits, kept = np.asarray(x, F32).view(np.uint32), np.uint32(23 - mantissa_bits)
    half = (np.uint32(1) << (kept - np.uint32(1))) - np.uint32(1) + ((bits >> kept) & np.uint32(1))
    bits = bits + half if rounding == "nearest" else bits
    return ((bits >> kept) << kept).view(F32).astype(F64)


def linear_reduced_mantissa(
    x: np.ndarray,
    w: np.ndarray,
    dy: np.ndarray,
    mantissa_bits: int = 3,
    rounding: str = "truncate",
    format: str = "BF16",
) -> Passes:
    """All six operands with few bits, the same in both GEMMs that take them: there are no scales."""
    qx, qw, qdy = (few_bits(each, mantissa_bits, rounding) for each in (x, plain(w, format), dy))
    return Passes(gemm(qx, qw), gemm(qdy, qw.T), gemm(qdy.T, qx.T))


def linear_fp8_block(x: np.ndarray, w: np.ndarray, dy: np.ndarray, block: int = 128, format: str = "BF16") -> Passes:
    """Lines of X, X^T, dY and dY^T along each GEMM's k; the same square blocks of W in fprop and dgrad."""

    def line(matrix: np.ndarray) -> np.ndarray:
        return quantize(matrix, "E4M3", (1, block), "POW2").exact

    qw = quantize(plain(w, format), "E4M3", (block, block), "POW2").exact
    return Passes(gemm(line(x), qw), gemm(line(dy), qw.T), gemm(line(dy.T), line(x.T)))


def linear_mxfp8(x: np.ndarray, w: np.ndarray, dy: np.ndarray, gradient: str = "E4M3", format: str = "BF16") -> Passes:
    """Blocks of 32 along each GEMM's k, W along both of its dimensions, exponents rounded up."""
    w = plain(w, format)

    def line(matrix: np.ndarray, name: str = "E4M3") -> np.ndarray:
        return quantize(matrix, name, (1, 32), "E8M0_CEIL").exact

    return Passes(gemm(line(x), line(w)), gemm(line(dy, gradient), line(w.T)), gemm(line(dy.T, gradient), line(x.T)))


def linear_fp4_mixed(
    x: np.ndarray,
    w: np.ndarray,
    dy: np.ndarray,
    block: int = 128,
    gradient: str = "E5M2",
    format: str = "BF16",
    rotate: Callable[[np.ndarray], np.ndarray] = lambda matrix: matrix,
) -> Passes:
    """Blocks of E2M1 in fprop, exponents within 28 (X) and 14 (W) binades of their row's largest; tensor-scaled FP8 in
    the backward pass, from X and W themselves. rotate: of both operands of wgrad, which the recipe does without."""
    w = plain(w, format)

    def whole(matrix: np.ndarray, name: str = "E4M3") -> np.ndarray:
        return quantize(matrix, name, rule="POW2").exact

    qx = quantize(x, "E2M1", (1, block), "E8M0_CEIL", span=28).exact
    qw = quantize(w, "E2M1", (1, block), "E8M0_CEIL", span=14).exact
    by_channel = gemm(whole(rotate(dy.T), gradient), whole(rotate(x.T)))
    return Passes(gemm(qx, qw), gemm(whole(dy, gradient), whole(w).T), by_channel)


@dataclass(frozen=True)
class NV:
    """NVFP4: seeds by (gemm, purpose), the micro-batch's first token, wgrad's Hadamard block (0: none), and whether dY
    is rounded stochastically, under 17/16 of head-room then. square: W in 16x16; row_scaled: an FP32 scale a row of
    X; selects: blocks of fprop reach 6 or 4."""

    seeds: Seeds
    first_token: int = 0
    rotation: int = 16
    stochastic: bool = True
    square: bool = True
    row_scaled: bool = False
    selects: bool = False

    def nearest(self, x: np.ndarray, tile: tuple[int, int] = (1, 16), outer: tuple[int, int] = (-1, -1)) -> np.ndarray:
        return quantize(x, "E2M1", tile, "NVFP4", outer=outer).exact

    def activation(self, x: np.ndarray) -> np.ndarray:
        """fprop's X."""
        outer = (1, -1) if self.row_scaled else (-1, -1)
        return four_over_six(x, outer=outer)[0].exact if self.selects else self.nearest(x, outer=outer)

    def weight(self, w: np.ndarray) -> np.ndarray:
        """fprop's W."""
        tile = (16, 16) if self.square else (1, 16)
        return four_over_six(w, tile)[0].exact if self.selects else self.nearest(w, tile)

    def gradient(self, dy: np.ndarray, which: int, origin: tuple[int, int]) -> np.ndarray:
        if not self.stochastic:
            return self.nearest(dy)
        bits = random_bits(self.seeds(which, A), *dy.shape, origin)
        return quantize(dy, "E2M1", (1, 16), "NVFP4", 16 / 17, bits=bits).exact

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Of wgrad's operands only, both by the same signs."""
        return rotate_float32(x, self.seeds(WGRAD, ROTATION), self.rotation) if self.rotation else x

    def kept(self, x: np.ndarray) -> np.ndarray:
        """wgrad's operand b, which is what fprop leaves of X."""
        return self.nearest(self.rotated(x.T))


def linear_nvfp4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, nv: NV, format: str = "BF16") -> Passes:
    w = plain(w, format)
    by_token = nv.gradient(dy, DGRAD, (nv.first_token, 0))
    by_channel = nv.gradient(nv.rotated(dy.T), WGRAD, (0, nv.first_token))
    return Passes(
        gemm(nv.activation(x), nv.weight(w)),
        gemm(by_token, nv.weight(w).T if nv.square else nv.nearest(w.T)),
        gemm(by_channel, nv.kept(x)),
    )


def fold3(x: np.ndarray, seed: int | None = None, gain: float = 1.0) -> np.ndarray:
    """Blocks of 16 on the ladder. seed: of signs, with which x is rotated first and its rows are corrected; gain: of a
    rotation, whose operands have gains with the product 1/128.
    """
    if seed is None:
        return ladder(x).rounded.exact
    made = ladder(rotate_half(x, seed, 128, gain))
    return made.rounded.exact * (made.factor().astype(F64))


def fold3_backward(dy: np.ndarray, w: np.ndarray, x: np.ndarray, seeds: Seeds) -> tuple[Product, Product]:
    """dX and dW of corrected operands, both of a GEMM rotated by the same signs."""
    by_token, by_channel = seeds(DGRAD, ROTATION), seeds(WGRAD, ROTATION)
    dx = gemm(fold3(dy, by_token, 1 / 8), fold3(w.T, by_token, 1 / 16))
    return dx, gemm(fold3(dy.T, by_channel, 1 / 8), fold3(x.T, by_channel, 1 / 16))


def linear_fp4_fold(x: np.ndarray, w: np.ndarray, dy: np.ndarray, seeds: Seeds, format: str = "BF16") -> Passes:
    """wgrad rounds the codes of X that fprop multiplied."""
    w, qx = plain(w, format), fold3(x)
    return Passes(gemm(qx, fold3(w)), *fold3_backward(dy, w, qx, seeds))


def linear_fp8_eden4(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, seeds: Seeds, format: str = "BF16", *, codes: bool = True
) -> Passes:
    """codes: wgrad rounds fprop's codes of X, not X itself."""
    w = plain(w, format)
    qx, qw = (quantize(each, "E4M3", rule="POW2").exact for each in (x, w))
    return Passes(gemm(qx, qw), *fold3_backward(dy, w, qx if codes else x, seeds))


@dataclass(frozen=True)
class Quartet:
    """Quartet II: seeds by (gemm, purpose), the micro-batch's first token, the Hadamard block of the backward GEMMs (0:
    none), and whether blocks of fprop reach 6 or 4."""

    seeds: Seeds
    first_token: int = 0
    rotation: int = 128
    selects: bool = True

    def forward(self, x: np.ndarray) -> np.ndarray:
        return four_over_six(x)[0].exact if self.selects else quantize(x, "E2M1", (1, 16), "NVFP4").exact

    def backward(self, x: np.ndarray, which: int, purpose: int, origin: tuple[int, int] = (0, 0)) -> np.ndarray:
        y = rotate_float32(x, self.seeds(which, ROTATION), self.rotation) if self.rotation else x
        return eden(y, self.seeds(which, purpose), origin).rounded.exact


def linear_quartet2(x: np.ndarray, w: np.ndarray, dy: np.ndarray, how: Quartet, format: str = "BF16") -> Passes:
    """The backward GEMMs round what fprop multiplied, in the dtype of the layer's input."""
    qx, qw, first = how.forward(x), how.forward(plain(w, format)), how.first_token
    kept_x, kept_w = (bf16(each.astype(F32)) if format == "BF16" else each.astype(F32) for each in (qx, qw))
    return Passes(
        gemm(qx, qw),
        gemm(how.backward(dy, DGRAD, A, (first, 0)), how.backward(kept_w.T, DGRAD, B)),
        gemm(how.backward(dy.T, WGRAD, A, (0, first)), how.backward(kept_x.T, WGRAD, B, (0, first))),
    )


def linear_int8_switchback(x: np.ndarray, w: np.ndarray, dy: np.ndarray, format: str = "BF16") -> Passes:
    """Integers in fprop and dgrad; dW is the unquantised linear's."""
    qw = quantize(plain(w, format), "INT8").exact
    rows = [quantize(each, "INT8", (1, -1)).exact for each in (x, dy)]
    return Passes(gemm(rows[0], qw), gemm(rows[1], qw.T), gemm(dy.T, x.T))


def linear_w4a8(x: np.ndarray, w: np.ndarray, dy: np.ndarray, gradient: str = "E5M2", format: str = "BF16") -> Passes:
    """MXFP4 codes of W, 14 binades a row; in dgrad a row's largest scale times 2^-6 is in dY, the rest in the codes."""
    qx = quantize(x, "E4M3", rule="POW2").exact
    qw = quantize(plain(w, format), "E2M1", (1, 32), "E8M0_CEIL", span=14)
    carriers = fold(qw.values, qw.scale, "E4M3")
    gradients = quantize((dy * carriers.scale.T).astype(np.float32), gradient, rule="POW2").exact
    by_channel = quantize(dy, gradient, rule="POW2").exact
    return Passes(gemm(qx, qw.exact), gemm(gradients, carriers.values.T), gemm(by_channel.T, qx.T))


@dataclass(frozen=True)
class UFP4:
    """Seeds by (gemm, purpose), the micro-batch's first token, the Hadamard block of all GEMMs (0: none), and whether
    dY is rounded stochastically."""

    seeds: Seeds
    first_token: int = 0
    rotation: int = 16
    stochastic: bool = True

    def operand(self, x: np.ndarray, which: int, origin: tuple[int, int] | None = None) -> np.ndarray:
        """origin: of a gradient, which is drawn."""
        if self.rotation:
            x = rotate_float32(x, self.seeds(which, ROTATION), self.rotation)
        drawn = origin is not None and self.stochastic
        bits = random_bits(self.seeds(which, A), *x.shape, origin) if drawn else None
        return quantize(x, "INT4", (1, 16), bits=bits).exact


def linear_ufp4(x: np.ndarray, w: np.ndarray, dy: np.ndarray, how: UFP4, format: str = "BF16") -> Passes:
    w, first = plain(w, format), how.first_token
    return Passes(
        gemm(how.operand(x, FPROP), how.operand(w, FPROP)),
        gemm(how.operand(dy, DGRAD, (first, 0)), how.operand(w.T, DGRAD)),
        gemm(how.operand(dy.T, WGRAD, (0, first)), how.operand(x.T, WGRAD)),
    )


def without_means(
    emulate: Callable[..., Passes], x: np.ndarray, w: np.ndarray, dy: np.ndarray, format: str = "BF16"
) -> Passes:
    """The mean split on a recipe that rounds both operands of all GEMMs: `emulate` of what varies between tokens, and
    the products of the means, which are FP32 numbers as what varies is."""
    (r, mu), (rg, mug) = (_split(each) for each in (x, dy))
    w, rest, tokens = plain(w, format), emulate(r, w, rg, format=format), len(x)
    return Passes(
        rest.y + gemm(mu.repeat(tokens, 0), w),
        rest.dx + gemm(mug.repeat(tokens, 0), w.T),
        rest.dw + gemm(tokens * mug.T, mu.T),
    )


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mu = x.mean(axis=0, keepdims=True).astype(np.float32).astype(np.float64)
    return (x - mu).astype(np.float32).astype(np.float64), mu


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Bytes [m, k / 2] -> E2M1 values [m, k]: the first code in the low half, its sign in bit 3."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return np.where(nibbles & 8, -1.0, 1.0) * TABLES["E2M1"][nibbles & 7]
