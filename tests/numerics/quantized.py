"""What the tests of the quantiser share: formats, tiles and seeds, and a comparison with the oracle bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from lowprec_train.numerics.formats import E2M1, E4M3, E5M2, FP16, INT4, INT8, NEAREST, STOCHASTIC, Format
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from tests import oracle

SCALED = (E2M1, E4M3, E5M2, INT4, INT8, FP16)
TILES = [(-1, -1), (1, -1), (-1, 8), (1, 32), (1, 16), (16, 16), (32, 1), (8, -1)]
POWERS = (ScaleRule.POW2, ScaleRule.E8M0_FLOOR, ScaleRule.E8M0_CEIL)
ROUNDING = {False: NEAREST, True: STOCHASTIC}
SEED = 0x1234_5678_9ABC_DEF0
M, K = 32, 64


def seed(value: int = SEED) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


def origin(row: int, column: int) -> torch.Tensor:
    return torch.tensor([row, column], dtype=torch.int64)


def codes(q: Quantized) -> np.ndarray:
    """Bytes, the sign of zero included."""
    return q.codes.contiguous().view(torch.uint8).numpy() if q.codes.element_size() == 1 else q.codes.numpy()


def expected_codes(e: oracle.Rounded, format: Format) -> np.ndarray:
    if format is FP16:
        return e.values.astype(np.float16)
    return oracle.encode(e.values, oracle.CARRIERS.get(format.name, format.name))


def rules(format: Format) -> list[ScaleRule]:
    """Those of any tile and rounding; LADDER has neither (test_ladder.py)."""
    others = (rule for rule in ScaleRule if rule is not ScaleRule.LADDER)
    return [rule for rule in others if rule is not ScaleRule.NVFP4 or format is E2M1]


def at_scale_one(values: np.ndarray, format: Format, **options) -> Quantized:
    """Quantised with the format's maximum beside them, whose power-of-two scale is 1. values [m, k] -> codes [m, k]"""
    column = np.full((len(values), 1), format.max)
    q = Quantizer(format, scale=ScaleRule.POW2, **options)
    x = torch.from_numpy(np.hstack([values, column]).astype(np.float32))
    got = q(x, seed() if q.stochastic else None)
    assert got.scale.item() == 1
    return Quantized(got.codes[:, :-1], got.scale)


def assert_equal_bits(q: Quantized, e: oracle.Rounded, format: Format, x: np.ndarray, tile: tuple[int, int]) -> None:
    """Codes everywhere; scales where the tile has a number in it."""
    occupied = np.abs(oracle.tiles(x, tile)).max(axis=(1, 3)) > 0
    np.testing.assert_array_equal(q.scale.numpy()[occupied], e.scale[occupied])
    assert torch.isfinite(q.scale).all() and (q.scale > 0).all()
    want = expected_codes(e, format)
    np.testing.assert_array_equal(codes(q), want)
    if want.dtype == np.float16:
        np.testing.assert_array_equal(np.signbit(codes(q)), np.signbit(want))
