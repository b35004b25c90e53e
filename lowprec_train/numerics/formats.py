"""Number formats as data: a new format is a new constant, not a new class.

E2M1 is OCP's FP4 (grid 0 .5 1 1.5 2 3 4 6); every E2M1 value is an exact E4M3 value, so E2M1 codes ride as
float8_e4m3fn. E4M3 and E5M2 are OCP FP8 (E4M3 without infinities, largest value 448).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec_train.ops.reference import GRIDS, UNSCALED
from lowprec_train.ops.schema import CARRIERS


@dataclass(frozen=True, kw_only=True)
class Format:
    """A grid of values and the dtype its codes travel in.

    `min_exponent` is the exponent of the smallest normal number; below it the grid is uniform with the step of that
    binade.
    """

    name: str
    carrier: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int
    grid: tuple[float, ...] = ()  # non-negative values, where they are few

    @property
    def scaled(self) -> bool:
        """False for formats with FP32's own exponent range, whose scale is always 1."""
        return self.name not in UNSCALED

    def __repr__(self) -> str:
        return self.name


def _format(name: str, grid: tuple[float, ...] = ()) -> Format:
    mantissa_bits, min_exponent, limit = GRIDS[name]
    return Format(
        name=name, carrier=CARRIERS[name], max=limit, mantissa_bits=mantissa_bits, min_exponent=min_exponent, grid=grid
    )


E2M1 = _format("E2M1", grid=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E4M3 = _format("E4M3")
E5M2 = _format("E5M2")
INT8 = _format("INT8", grid=tuple(float(i) for i in range(128)))
BF16 = _format("BF16")
FP16 = _format("FP16")
FP32 = _format("FP32")

FORMATS = {f.name: f for f in (E2M1, E4M3, E5M2, INT8, BF16, FP16, FP32)}


def parse_format(name: str) -> Format:
    """The format of a name. Raises ValueError for an unknown one."""
    if name.upper() not in FORMATS:
        raise ValueError(f"unknown format {name!r}; formats are {', '.join(FORMATS)}")
    return FORMATS[name.upper()]
