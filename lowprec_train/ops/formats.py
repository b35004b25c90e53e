"""Number formats as one table, for the reference, the compiled kernels and formats of users.

The values of a format with p mantissa bits, smallest normal exponent e0 and largest value M are

    +- n 2^(e - p),    0 <= n < 2^(p + 1),  e >= e0,  n 2^(e - p) <= M

so the grid is uniform below 2^e0. E2M1 is OCP's FP4 (0 .5 1 1.5 2 3 4 6), E4M3 and E5M2 are OCP's FP8 (E4M3 without
infinities, M = 448). INT8 is the uniform grid of step 1: p = e0 = 6, M = 127; INT4 likewise, p = e0 = 2, M = 7. Codes
are stored in a torch dtype, the carrier, that represents every value of the format: E2M1 uses float8_e4m3fn.

`register_format` adds a format from other packages (docs/adding_a_format.md). The reference supports all formats of the
table; a compiled kernel supports those that its library was built with (`ops.library`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

CARRIERS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)
"""The dtypes that the ops can decode."""

FEW = 128  # `Format.grid` lists formats with at most twice as many non-negative values


@dataclass(frozen=True, kw_only=True)
class Format:
    """A grid of values and the dtype that stores its codes.

    name: in capitals, as in configurations. mantissa_bits: p, min_exponent: e0, max: M above.
    scaled: False for formats with the exponent range of FP32, whose scale is always 1.
    native: the values of the carrier are those of the format, so torch's cast rounds to nearest.

    Raises ValueError for numbers that do not define a grid, and for a carrier that cannot represent all values.
    """

    name: str
    carrier: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int
    scaled: bool = field(init=False)
    native: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaled", self.min_exponent > -126)
        if not self.name or self.name != self.name.upper() or not self.name.isidentifier():
            raise ValueError(f"a format's name has letters and digits in capitals, not {self.name!r}")
        if not 0 <= self.mantissa_bits <= 23 or not -126 <= self.min_exponent <= 127:
            raise ValueError(
                f"{self.name}: {self.mantissa_bits} mantissa bits from exponent {self.min_exponent} are not within FP32"
            )
        if self.scaled and self.min_exponent - self.mantissa_bits < -125:
            raise ValueError(f"{self.name}: a step of 2^{self.min_exponent - self.mantissa_bits} is below 2^-125")
        if not 0 < self.max < math.inf or self.max < 2.0 ** (self.min_exponent - self.mantissa_bits):
            raise ValueError(f"{self.name}: the largest value must be a positive number of the grid, not {self.max}")
        top = max(math.frexp(self.max)[1] - 1, self.min_exponent)
        if self.max % 2.0 ** (top - self.mantissa_bits):
            raise ValueError(f"{self.name}: {self.max} is not on a grid with {self.mantissa_bits} mantissa bits")
        if self.carrier not in CARRIERS:
            raise ValueError(f"{self.name}: carriers are {', '.join(map(str, CARRIERS))}, not {self.carrier}")
        if not self._fits():
            raise ValueError(f"{self.name}: {self.carrier} cannot represent all of its values")
        here = (self.mantissa_bits, self.min_exponent, self.max)
        object.__setattr__(self, "native", self.carrier.is_floating_point and here == _floating(self.carrier))

    def _fits(self) -> bool:
        step = self.min_exponent - self.mantissa_bits
        if not self.carrier.is_floating_point:
            return step >= 0 and self.max <= torch.iinfo(self.carrier).max
        p, lowest, largest = _floating(self.carrier)
        return self.mantissa_bits <= p and step >= lowest - p and self.max <= largest

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the non-negative values in order if there are at most 256, else an empty tuple."""
        p, top = self.mantissa_bits, math.frexp(self.max)[1] - 1
        if (max(top - self.min_exponent, 0) + 2) << p > 2 * FEW:
            return ()
        lowest = range(2 ** (p + 1))
        upper = ((n, e) for e in range(self.min_exponent + 1, top + 1) for n in range(2**p, 2 ** (p + 1)))
        values = (n * 2.0 ** (e - p) for n, e in (*((n, self.min_exponent) for n in lowest), *upper))
        return tuple(value for value in values if value <= self.max)

    def __repr__(self) -> str:
        return self.name


def _floating(dtype: torch.dtype) -> tuple[int, int, float]:
    """Return (mantissa bits, exponent of the smallest normal number, largest value) of a torch dtype."""
    info = torch.finfo(dtype)
    return 1 - math.frexp(info.eps)[1], math.frexp(info.smallest_normal)[1] - 1, info.max


FORMATS: dict[str, Format] = {}
"""Name -> format; ops look up format names here."""


def register_format(format: Format) -> Format:
    """Add a format to the table, and return it; adding it again changes nothing.

    Raises ValueError if another format has the name.
    """
    taken = FORMATS.setdefault(format.name, format)
    if taken != format:
        raise ValueError(f"there is a format {format.name} already, with other numbers: {vars(taken)}")
    return taken


def parse_format(name: str) -> Format:
    """Return the format of a name in upper or lower case. Raises ValueError for an unknown one."""
    if name.upper() not in FORMATS:
        raise ValueError(f"unknown format {name!r}; formats are {', '.join(FORMATS)}")
    return FORMATS[name.upper()]


def _add(name: str, carrier: torch.dtype, mantissa_bits: int, min_exponent: int, largest: float) -> Format:
    return register_format(
        Format(name=name, carrier=carrier, max=largest, mantissa_bits=mantissa_bits, min_exponent=min_exponent)
    )


E2M1 = _add("E2M1", torch.float8_e4m3fn, 1, 0, 6.0)
E4M3 = _add("E4M3", torch.float8_e4m3fn, 3, -6, 448.0)
E5M2 = _add("E5M2", torch.float8_e5m2, 2, -14, 57344.0)
INT4 = _add("INT4", torch.float8_e4m3fn, 2, 2, 7.0)
INT8 = _add("INT8", torch.int8, 6, 6, 127.0)
BF16 = _add("BF16", torch.bfloat16, 7, -126, torch.finfo(torch.bfloat16).max)
FP16 = _add("FP16", torch.float16, 10, -14, torch.finfo(torch.float16).max)
FP32 = _add("FP32", torch.float32, 23, -126, torch.finfo(torch.float32).max)
