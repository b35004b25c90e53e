"""Matrices that numbers go wrong on."""

from __future__ import annotations

import numpy as np

F32 = np.float32


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(m: int, k: int) -> np.ndarray:
    return generator(1).standard_normal((m, k)).astype(F32)


def heavy(m: int, k: int) -> np.ndarray:
    """Student t with 1.5 degrees of freedom, magnified per channel over six decades."""
    g = generator(2)
    return (g.standard_t(1.5, (m, k)) * 10.0 ** g.uniform(-3, 3, k)).astype(F32)


def sparse(m: int, k: int) -> np.ndarray:
    """Zero rows, zero blocks, negative zeros, and rows of one value."""
    x = normal(m, k) * (generator(3).random((m, k)) < 0.3)
    x[0], x[1], x[:, : k // 2], x[2] = 0.0, -0.0, x[:, : k // 2] * (np.arange(m) % 3 > 0)[:, None], 1e-3
    return x.astype(F32)


def boundaries(m: int, k: int) -> np.ndarray:
    """Powers of two, their neighbours below and above, 4, 6 and 8 at every binade: amax values where exponents turn."""
    g = generator(4)
    base = np.array([1, 1 - 2.0**-24, 1 + 2.0**-23, 1.5, 1.5 - 2.0**-24, 1.5 + 2.0**-23, 1.75, 1.125, 1.0625])
    x = g.choice(base, (m, k)) * np.ldexp(1.0, g.integers(-12, 13, (m, k))) * g.choice([-1, 1], (m, k))
    return x.astype(F32)


def tiny(m: int, k: int) -> np.ndarray:
    """FP32 subnormals beside the smallest normals."""
    return (generator(5).standard_normal((m, k)) * np.ldexp(1.0, generator(6).integers(-149, -120, (m, k)))).astype(F32)


def huge(m: int, k: int) -> np.ndarray:
    x = generator(7).uniform(-1, 1, (m, k)) * float(np.finfo(F32).max)
    return x.astype(F32)


MATRICES = {f.__name__: f for f in (normal, heavy, sparse, boundaries, tiny, huge)}
