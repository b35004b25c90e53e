"""Matrices for the independent oracle: every kind of number a quantiser can meet, at random scales over 60 binades.

NumPy alone; nothing here may import the package. A case is a function (m, k, tile, format, g) -> float32 [m, k];
scales, exponents and maxima are drawn per tile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracle import F32, TABLES, largest, spread

Tile = tuple[int, int]
Case = Callable[[int, int, Tile, str, np.random.Generator], np.ndarray]
ULP = 2.0**-23

# tile -> a shape that it divides, odd where it may be
SHAPES: dict[Tile, tuple[int, int]] = {
    (-1, -1): (13, 37),
    (1, -1): (29, 45),
    (-1, 1): (45, 29),
    (1, 1): (9, 43),
    (1, 16): (11, 112),
    (1, 32): (11, 160),
    (1, 128): (5, 256),
    (16, 16): (32, 48),
    (128, 128): (256, 128),
    (24, 40): (24, 40),  # the whole, spelled out
    (3, 5): (21, 35),
    (5, -1): (35, 17),
    (-1, 7): (17, 35),
}


def shares(m: int, k: int, tile: Tile) -> tuple[int, int]:
    """How many tiles there are: [rows, columns]"""
    return m // (m if tile[0] == -1 else tile[0]), k // (k if tile[1] == -1 else tile[1])


def per_tile(values: np.ndarray, m: int, k: int, tile: Tile) -> np.ndarray:
    """One number a tile, chosen by the caller, spread over its elements."""
    return spread(values.reshape(shares(m, k, tile)), (m, k))


def exponents(m: int, k: int, tile: Tile, g: np.random.Generator, binades: int = 60) -> np.ndarray:
    count = int(np.prod(shares(m, k, tile)))
    return per_tile(g.integers(-binades // 2, binades // 2 + 1, count), m, k, tile)


def scales(m: int, k: int, tile: Tile, g: np.random.Generator) -> np.ndarray:
    """A random scale for each tile, log-uniform over 60 binades."""
    return per_tile(2.0 ** g.uniform(-30, 30, int(np.prod(shares(m, k, tile)))), m, k, tile)


def signed(x: np.ndarray, g: np.random.Generator) -> np.ndarray:
    return (x * g.choice([-1.0, 1.0], x.shape)).astype(F32)


def normal(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    return (g.standard_normal((m, k)) * scales(m, k, tile, g)).astype(F32)


def wide(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """Every element at a scale of its own: most of a tile is subnormal or flushes."""
    return signed(2.0 ** g.uniform(-30, 30, (m, k)), g)


def zeros(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """Zeros and negative zeros among numbers, empty tiles, rows and columns, and tiles with one number."""
    x = normal(m, k, tile, format, g) * g.choice([-0.0, 0.0, 1.0], (m, k))
    kept = g.choice([0.0, 1.0], int(np.prod(shares(m, k, tile))))
    x = x * per_tile(kept, m, k, tile)
    x[g.integers(m)], x[:, g.integers(k)] = 0.0, -0.0
    x[m - 1, k - 1] = -1e-9
    return x.astype(F32)


def turning(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """2^k, M 2^k and their shares 3/4 and 16/17, with their FP32 neighbours: where an exponent or a quotient turns."""
    top = largest(format)
    base = np.array([1.0, 1.5, 1.75, top, 3 / 4 * top, 16 / 17 * top])
    near = np.array([1 - ULP, 1 - ULP / 2, 1, 1 + ULP, 1 + 2 * ULP])
    maxima = g.choice((base[:, None] * near).ravel(), int(np.prod(shares(m, k, tile))))
    lower = g.choice([1.0, 1.0, 0.5, 0.75, 1 - ULP / 2, 0.3, 2.0**-9], (m, k))
    return signed(np.ldexp(per_tile(maxima, m, k, tile) * lower, exponents(m, k, tile, g)), g)


def ties(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """Codes, midpoints and the FP32 neighbours of both, times a power of two a tile; each tile holds M."""
    table = TABLES[format]
    places = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    x = g.choice(places, (m, k)) * g.choice([1 - ULP, 1 - ULP / 2, 1.0, 1.0, 1.0, 1 + ULP], (m, k))
    rows, columns = shares(m, k, tile)
    x[:: m // rows, :: k // columns] = table[-1]
    return signed(np.ldexp(np.minimum(x, table[-1]), exponents(m, k, tile, g)), g)


def subnormal(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """FP32 subnormals beside the smallest normals."""
    return signed(np.ldexp(g.uniform(1, 2, (m, k)), g.integers(-150, -115, (m, k))), g)


def large(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """Up to the largest FP32 number, reached in every other tile."""
    top = float(np.finfo(F32).max)
    x = np.ldexp(g.uniform(1, 2, (m, k)), g.integers(90, 127, (m, k)))
    rows, columns = shares(m, k, tile)
    x[:: m // rows, :: 2 * (k // columns)] = top
    return signed(np.minimum(x, top), g)


def extremes(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """1e-30 and 1e30 alone in a tile and beside each other, and 1."""
    alone = per_tile(g.choice([1e-30, 1e30, 1.0], int(np.prod(shares(m, k, tile)))), m, k, tile)
    mixed = g.choice([1e-30, 1e30, 1.0, 0.0], (m, k))
    return signed(np.where(g.random((m, k)) < 0.8, alone, mixed), g)


def patterns(m: int, k: int, tile: Tile, format: str, g: np.random.Generator) -> np.ndarray:
    """Any 32 bits that are a finite number."""
    x = g.integers(0, 2**32, (m, k), dtype=np.uint32).view(F32)
    return np.where(np.isfinite(x), x, F32(0)).astype(F32)


CASES: tuple[Case, ...] = (normal, wide, zeros, turning, ties, subnormal, large, extremes, patterns)
