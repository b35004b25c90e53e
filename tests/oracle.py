"""What the numerics should be, written from the specification alone: docs/numerics.md and the papers it names.

NumPy in FP64, no bit tricks and no torch: a format is the list of values that its bit layout decodes to, rounding is a
bisection of that list, and a tie goes to the even code. FP32 steps that the specification names (scales, `x /
s`, Hadamard butterflies) are single correctly rounded float32 operations. Nothing here may import the package.

    values  decoded codes, FP64 [m, k]         scale  float32 [m / rows, k / columns]        x ~ values * scale
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

F32 = np.float32
F64 = np.float64


# --- formats: every non-negative code's value, by its index ---


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, specials: int) -> np.ndarray:
    """Values of the codes 0, 1, 2, ... with the sign bit clear, less the last `specials` codes (Inf and NaN)."""
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - specials):
        exponent, fraction = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((2**mantissa_bits + fraction) * 2.0 ** (exponent - bias - mantissa_bits))
    return np.array(values)


TABLES = {
    "E2M1": minifloat(2, 1, bias=1, specials=0),
    "E4M3": minifloat(4, 3, bias=7, specials=1),
    "E5M2": minifloat(5, 2, bias=15, specials=4),
    "FP16": minifloat(5, 10, bias=15, specials=2**10),
    "BF16": minifloat(8, 7, bias=127, specials=2**7),
    "INT4": np.arange(8, dtype=F64),
    "INT8": np.arange(128, dtype=F64),
}
CARRIERS = {"E2M1": "E4M3", "INT4": "E4M3", "E4M3": "E4M3", "E5M2": "E5M2"}


def largest(format: str) -> float:
    return float(TABLES[format][-1])


def neighbours(magnitude: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the values around each magnitude (equal on the grid); beyond the table, its last code."""
    above = np.minimum(np.searchsorted(table, magnitude, side="left"), len(table) - 1)
    below = np.where(table[above] > magnitude, np.maximum(above - 1, 0), above)
    return below, above


def to_grid(x: np.ndarray, format: str, bits: np.ndarray | None = None) -> np.ndarray:
    """x rounded to a value of the format, saturating, the sign of zero kept, NaN kept.

    bits: the 16 random bits of each element; None rounds to nearest, ties to the even code. Rounds up when 65536 f > r
    + 1/2, f being the place between the neighbours."""
    x = np.asarray(x, F64)
    table = TABLES[format]
    magnitude = np.minimum(np.abs(np.nan_to_num(x, nan=0.0)), table[-1])
    below, above = neighbours(magnitude, table)
    gap = table[above] - table[below]
    place = np.divide(magnitude - table[below], gap, out=np.zeros_like(magnitude), where=gap > 0)
    if bits is None:
        up = (place > 0.5) | ((place == 0.5) & (above % 2 == 0))
    else:
        up = 65536 * place > bits + 0.5
    rounded = np.copysign(table[np.where(up, above, below)], x)
    return np.where(np.isnan(x), np.nan, rounded)


def encode(values: np.ndarray, format: str) -> np.ndarray:
    """The bytes of values that the format holds exactly: sign and code, two's complement for INT8."""
    if format == "INT8":
        return values.astype(np.int8).view(np.uint8)
    code = np.searchsorted(TABLES[format], np.abs(values))
    assert np.array_equal(TABLES[format][code], np.abs(values)), f"not values of {format}"
    return (code + 128 * np.signbit(values)).astype(np.uint8)


def bf16(x: np.ndarray) -> np.ndarray:
    return to_grid(x, "BF16")


# --- scales ---


def tiles(x: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """[m, k] -> [m / rows, rows, k / columns, columns]"""
    m, k = x.shape
    rows, columns = (m if tile[0] == -1 else tile[0]), (k if tile[1] == -1 else tile[1])
    return x.reshape(m // rows, rows, k // columns, columns)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale per tile -> a scale per element."""
    return scale.repeat(shape[0] // scale.shape[0], axis=0).repeat(shape[1] // scale.shape[1], axis=1)


def floor_log2(x: np.ndarray) -> np.ndarray:
    """By halving and doubling exactly (frexp), never by a logarithm."""
    return np.frexp(np.asarray(x, F64))[1] - 1


def ceil_exponent(amax: np.ndarray, top: float) -> np.ndarray:
    """The smallest e with amax <= 2^e * top."""
    e = floor_log2(amax) - int(floor_log2(top)) + 2
    for _ in range(4):
        e = np.where(amax <= np.ldexp(top, e - 1), e - 1, e)
    return e


def power_exponents(amax: np.ndarray, format: str, rule: str, headroom: float, span: int) -> np.ndarray:
    """Exponents of power-of-two scales; those of empty tiles are the lowest that the span permits, 0 without one."""
    top = largest(format)
    if rule == "E8M0_FLOOR":
        e = floor_log2(amax) - int(floor_log2(top))
    else:
        e = ceil_exponent(amax, top * headroom)
    e = np.clip(e, -126, 127)
    if not span:
        return np.where(amax == 0, 0, e)
    row = np.where(amax == 0, -126, e).max(axis=1, keepdims=True)
    return np.maximum(np.where(amax == 0, -126, e), np.maximum(row - span, -126))


def tile_scales(amax: np.ndarray, format: str, rule: str, headroom: float = 1.0, span: int = 0) -> np.ndarray:
    """float32 scale of each tile from its largest magnitude, finite and rounded as the specification says."""
    if rule == "FP32":
        scale = np.maximum((amax / (largest(format) * headroom)).astype(F32), F32(2.0**-126))
        return np.where(amax == 0, F32(1), scale)
    scale = np.ldexp(1.0, power_exponents(amax, format, rule, headroom, span))
    if rule == "E8M0_FLOOR":
        scale = np.where((amax == 0) & (span == 0), 1.0, scale / headroom)
    return scale.astype(F32)


def nvfp4_scales(
    amax: np.ndarray, headroom: float, outer: tuple[int, int] = (-1, -1)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(effective scale float32, block scales as E4M3 values, tensor scale float32, one for each outer tile)

    In the order of arXiv 2509.25149: a block's own scale A / (6 h) first, in FP32, and of that the share of the
    tensor's. One quotient A / (6 h t) would fall on the other side of an E4M3 tie now and then. With head-room no block
    clips: where its scale was rounded down so far that A / s > 6, which takes a subnormal, the next one is taken."""
    most = amax.max(axis=tuple(axis for axis in (0, 1) if outer[axis] == -1), keepdims=True)
    tensor = np.maximum((most / (6 * 448)).astype(F32), F32(2.0**-117))
    own = (amax / (6 * headroom)).astype(F32)
    share = (own / tensor.astype(F64)).astype(F32)
    block = to_grid(np.maximum(share, 2.0**-9), "E4M3")
    if headroom < 1:
        clips = (scaled(amax, (block * tensor.astype(F64)).astype(F32)) > 6) & (block < 448)
        place = np.searchsorted(TABLES["E4M3"], np.where(clips, block, 0.0))
        block = np.where(clips, TABLES["E4M3"][place + 1], block)
    return np.where(amax == 0, F32(1), (block * tensor.astype(F64)).astype(F32)), block, tensor


@dataclass(frozen=True)
class Rounded:
    """values FP64 [m, k], scale float32 per tile."""

    values: np.ndarray
    scale: np.ndarray

    @property
    def exact(self) -> np.ndarray:
        """values * scale, not rounded."""
        return self.values * spread(self.scale.astype(F64), self.values.shape)


def scaled(x: np.ndarray, scale: np.ndarray, headroom: float = 1.0) -> np.ndarray:
    """fp32(x / s): what is rounded to the grid. The quotient by FP64, whose rounding does not show in FP32.

    headroom: where the scale is 2^e / h, then the quotient is that of x h by 2^e."""
    with np.errstate(all="ignore"):
        power = scale if headroom == 1 else (scale.astype(F64) * headroom).astype(F32)
        return (np.asarray(x, F32).astype(F64) * F64(F32(headroom)) / spread(power.astype(F64), x.shape)).astype(F32)


def by_inverse(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """fp32(x * fp32(1 / s)): the place that the estimator's slope is taken at, which rounds nothing to a grid."""
    with np.errstate(all="ignore"):
        return np.asarray(x, F32) * spread(F32(1) / scale.astype(F32), x.shape)


def quantize(
    x: np.ndarray,
    format: str,
    tile: tuple[int, int] = (-1, -1),
    rule: str = "FP32",
    headroom: float = 1.0,
    span: int = 0,
    bits: np.ndarray | None = None,
    outer: tuple[int, int] = (-1, -1),
) -> Rounded:
    """The quantiser; x finite."""
    x = np.asarray(x, F32)
    amax = np.abs(tiles(x, tile)).max(axis=(1, 3)).astype(F64)
    if rule == "NVFP4":
        scale = nvfp4_scales(amax, headroom, outer)[0]
    else:
        scale = tile_scales(amax, format, rule, headroom, span)
    return Rounded(to_grid(scaled(x, scale, headroom if rule == "E8M0_FLOOR" else 1.0), format, bits), scale)


# --- draws ---


def philox(counter: tuple, key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words for each counter, in uint64."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c = [np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter)]
    k = [np.uint64(word) for word in key]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(second >> half) ^ c[1] ^ k[0], second & low, (first >> half) ^ c[3] ^ k[1], first & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def split64(number: int) -> tuple[int, int]:
    """Low and high 32 bits, two's complement for a negative one."""
    return number % 2**32, (number >> 32) % 2**32


def random_bits(seed: int, rows: int, columns: int, origin: tuple[int, int] = (0, 0)) -> np.ndarray:
    """16 bits for each element of a matrix whose first element is `origin` of the whole."""
    row = origin[0] + np.arange(rows)[:, None]
    column = origin[1] + np.arange(columns)[None, :]
    words = np.stack(philox((column >> 3, row, 0, 0), split64(seed)))
    chosen = np.take_along_axis(words, np.broadcast_to((column & 7) >> 1, (1, rows, columns)), axis=0)[0]
    return ((chosen.astype(np.int64) >> (16 * (column & 1))) & 0xFFFF).astype(np.int64)


def draw_seed(run_seed: int, site: int, gemm: int, purpose: int, step: int, first_token: int = 0) -> int:
    """The entry of the seed table: 63 bits, two words of Philox. X, dY, dY^T and X^T (operand a of a GEMM, operand b
    of wgrad) are addressed by their tokens; W, W^T and the signs by the micro-batch, in the bits above the step."""
    has_tokens = purpose == 1 or (gemm, purpose) == (2, 2)
    micro_batch = 0 if has_tokens else first_token // 8
    words = philox((site, 3 * gemm + purpose, *split64(step + (micro_batch << 36))), split64(run_seed))
    return (int(words[0]) | int(words[1]) << 32) % 2**63


# --- random Hadamard transform ---


def hadamard_matrix(block: int) -> np.ndarray:
    """Sylvester's matrix of +-1."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def signs(seed: int, block: int) -> np.ndarray:
    return 1.0 - 2.0 * (random_bits(seed, 1, block)[0] & 1)


def rotate(x: np.ndarray, seed: int, block: int) -> np.ndarray:
    """x diag(d) H / sqrt(g) on every block along k, in FP64 by the explicit matrix."""
    matrix = signs(seed, block)[:, None] * hadamard_matrix(block) / np.sqrt(block)
    return (np.asarray(x, F64).reshape(-1, block) @ matrix).reshape(x.shape)


def rotate_float32(x: np.ndarray, seed: int, block: int) -> np.ndarray:
    """The same as butterflies in float32, stride 1 first."""
    y = np.asarray(x, F32).reshape(-1, block) * signs(seed, block).astype(F32)
    stride = 1
    while stride < block:
        pairs = y.reshape(-1, block // (2 * stride), 2, stride)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        stride *= 2
    return (y * F32(block**-0.5)).reshape(x.shape)


# --- folding ---

FOLD_TOP = {"E5M2": 13, "E4M3": 6}


def fold(values: np.ndarray, scale: np.ndarray, carrier: str) -> Rounded:
    """Block exponents moved into the codes; the result has a scale per row."""
    e = floor_log2(scale)
    e_row = e.max(axis=1, keepdims=True)
    top = FOLD_TOP[carrier]
    folded = np.ldexp(values, spread(e - e_row + top, values.shape))
    at_row = np.take_along_axis(scale, e.argmax(axis=1)[:, None], axis=1)
    return Rounded(folded, (at_row * 2.0**-top).astype(F32))


# --- outliers ---


def clipped(quantile: float, k: int) -> int:
    """floor((1 - q) k) of the quantile as it is written, without the noise of binary fractions."""
    return int((1 - Fraction(str(quantile))) * k)


def clamp_bounds(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The (count + 1)-th smallest and largest of each row, [m, 1] each, by sorting."""
    ordered = np.sort(x, axis=1)
    k = x.shape[1]
    return ordered[:, count : count + 1], ordered[:, k - 1 - count : k - count]


def body(x: np.ndarray, quantile: float) -> np.ndarray:
    return np.clip(x, *clamp_bounds(x, clipped(quantile, x.shape[1])))


def carrier_codes(x: np.ndarray, count: int) -> Rounded:
    """E2M1 codes of the body at 2^-8 in E4M3, outliers rounded once to E4M3 beside them, the largest not clipped."""
    low, high = clamp_bounds(x, count)
    edge, top = np.maximum(np.abs(low), np.abs(high)).astype(F64), np.abs(x).max(axis=1, keepdims=True).astype(F64)
    base = np.maximum(edge / 6, top / (448 * 256)).astype(F32)
    base = np.where(top == 0, F32(1), np.maximum(base, F32(2.0**-126)))
    ratio = scaled(x, base).astype(F64)
    inner = to_grid(ratio, "E2M1") / 256
    outlier = (x < low) | (x > high)
    return Rounded(np.where(outlier, to_grid(ratio / 256, "E4M3"), inner), (base * F32(256)).astype(F32))


# --- differentiable gradient estimator ---


def surrogate(x: np.ndarray, k: float) -> np.ndarray:
    """The smooth staircase f on the E2M1 grid, odd in x."""
    table = TABLES["E2M1"]
    magnitude = np.abs(x)
    index = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 2)
    low, width = table[index], table[index + 1] - table[index]
    u = 2 * (magnitude - low) / width - 1
    return np.sign(x) * (low + width / 2 * (1 + np.sign(u) * np.abs(u) ** (1 / k)))


def slope(x: np.ndarray, k: float = 5.0, cap: float = 3.0) -> np.ndarray:
    """f', capped, in closed form."""
    table = TABLES["E2M1"]
    magnitude = np.abs(np.asarray(x, F64))
    index = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 2)
    u = np.abs(2 * (magnitude - table[index]) / (table[index + 1] - table[index]) - 1)
    with np.errstate(divide="ignore"):
        return np.minimum(u ** (1 / k - 1) / k, cap) if k != 1 else np.ones_like(u)
