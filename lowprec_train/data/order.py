"""The order of samples as arithmetic: a function of the position in the run, without a stored permutation.

Shuffling is a keyed bijection of 0 .. size-1. A Feistel network permutes the next power of four; a value outside of the
range is permuted again until it lies inside (cycle walking; Black and Rogaway 2002). The epoch is part of the key. Each
element costs the same few operations, so resuming at step 10^6 is as fast as at step 0, and there is no index array.

Blending uses Megatron's greedy rule: position n goes to the dataset with the largest error `share * (n + 1) - taken`.
With shares p_i / q of integers the errors return to zero after q positions, so the sequence has period q and a table of
one period is sufficient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8
_LONGEST_PERIOD = 1 << 16


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit affects every output bit (the finaliser of splitmix64)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffle_key(seed: int, stream: int, epoch: np.ndarray) -> np.ndarray:
    """Return the key of each epoch (any integer array) of one stream of a run, uint64 of the same shape."""
    key = mix(np.full(epoch.shape, seed & (2**64 - 1), np.uint64))
    key = mix(key ^ np.uint64(stream))
    return mix(key ^ epoch.astype(np.uint64))


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Permute each index in 0 .. size-1 with the permutation of its key; int64, uint64 -> int64 [n]."""
    half = np.uint64((max(2, (size - 1).bit_length()) + 1) // 2)
    image = _feistel(index.astype(np.uint64), half, key)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _feistel(image[outside], half, key[outside])
        outside = outside[image[outside] >= size]
    return image.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, key: np.ndarray) -> np.ndarray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for number in range(_ROUNDS):
        left, right = right, left ^ (mix(right ^ mix(key ^ np.uint64(number))) & low)
    return left << half | right


class Blend:
    """Assigns the positions of a run to datasets in proportion to `weights`.

    Weights need not sum to 1. Shares that are multiples of 1/q for some q <= 65,536 (such as weights of up to four
    decimals that sum to 1) are met exactly in every q positions; other shares are rounded to such multiples. Megatron's
    own loop (build_blending_indices, core 0.19) has max(n, 1) for n + 1: the same proportions, some neighbours swapped.

    Raises:
        ValueError: a weight is not a positive finite number, or a share is below 1/65,536.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        parts = _integer_shares(weights)
        self._parts = np.asarray(parts, np.int64)
        self._period = sum(parts)
        self._source, self._nth = _greedy(parts)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each dataset, in order; they sum to 1."""
        return tuple(float(part) / self._period for part in self._parts)

    def __call__(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each position, and the number of its earlier samples; int64 [n] -> int64 [n] twice."""
        period, within = np.divmod(place, self._period)
        source = self._source[within]
        return source, period * self._parts[source] + self._nth[within]


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Return the shares as integers without a common divisor; their sum is at most the longest period."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"blend weight {weight}: must be a positive number; weights: {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > _LONGEST_PERIOD:
        return _rounded(shares, weights)
    return [int(share * period) for share in shares]


def _rounded(shares: list[Fraction], weights: Sequence[float]) -> list[int]:
    """Round the shares to multiples of the smallest share, by largest remainder."""
    scaled = [share * _LONGEST_PERIOD for share in shares]
    smallest = min(scaled)
    if smallest < 1:
        raise ValueError(
            f"blend weight {weights[scaled.index(smallest)]} is {float(smallest / _LONGEST_PERIOD):.3g} of the blend; "
            f"the smallest share is 1/{_LONGEST_PERIOD}"
        )
    parts = [int(value) for value in scaled]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - scaled[i], i))
    for i in by_remainder[: _LONGEST_PERIOD - sum(parts)]:
        parts[i] += 1
    return parts


def _greedy(parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute one period of the greedy rule: dataset and ordinal per position. Errors are integers (times period)."""
    step, period = np.asarray(parts, np.int64), sum(parts)
    error, taken = np.zeros_like(step), np.zeros_like(step)
    source, nth = np.empty(period, np.int64), np.empty(period, np.int64)
    for place in range(period):
        error += step
        chosen = int(error.argmax())
        error[chosen] -= period
        source[place], nth[place] = chosen, taken[chosen]
        taken[chosen] += 1
    assert not error.any(), error  # so `Blend` is periodic
    return source, nth
