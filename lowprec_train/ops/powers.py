"""log2 and 2^x from + - x and the exponent field only: the same bits on every machine and at every index of a tensor.

    x = 2^e (1 + t),  t in [-1/4, 1/2)          log2 x = e + t Q(t)          Q of degree 8
    x = i + f,        f in [-1/2, 1/2]          2^x    = 2^i (1 + f R(f))    R of degree 5

Horner's rule, with each product rounded before its sum (no FMA contraction). The polynomials are minimax fits. Over all
2^23 mantissas |log2 - exact| <= 8.4e-8; over the 2^24 multiples of 2^-24 in [-1/2, 1/2) |2^x / exact - 1| <= 1.1e-7.
log2 of a power of two and 2^i are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_train.ops.exponents import exp2_int

LOG2 = (
    1.4426950216293335,
    -0.7213494181632996,
    0.48090195655822754,
    -0.36052969098091125,
    0.28816312551498413,
    -0.24336443841457367,
    0.21712137758731842,
    -0.17190004885196686,
    0.07444677501916885,
)
EXP2 = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)


def log2_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e int32, log2(x 2^-e) FP32 in [-0.42, 0.59)) of normal positive FP32 x. A difference of logarithms keeps
    the precision of its fraction if exponents are subtracted first.
    """
    bits = x.contiguous().view(torch.int32)
    mantissa = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32)
    high = mantissa >= 1.5
    t = torch.where(high, mantissa * 0.5, mantissa) - 1.0
    return (bits >> 23) - 127 + high, _horner(LOG2, t) * t


def log2(x: Tensor) -> Tensor:
    """Return FP32 log2 of normal positive FP32 x."""
    whole, fraction = log2_parts(x)
    return whole.float() + fraction


def exp2_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (i int32, 2^(x - i) FP32 in [0.70, 1.42]) of FP32 x, |x| < 2^22."""
    whole = (x + 0.5).floor()
    f = x - whole
    return whole.int(), _horner(EXP2, f) * f + 1.0


def exp2(x: Tensor) -> Tensor:
    """Return FP32 2^x for x in [-126, 127]."""
    whole, part = exp2_parts(x)
    return part * exp2_int(whole)


def _horner(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """Return the sum of coefficients[i] t^i."""
    total = torch.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total.mul_(t).add_(coefficient)
    return total
