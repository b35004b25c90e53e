"""GEMM operands with BF16's exponents and fewer mantissa bits: a simulation of precision, no gain in speed.

    Y = T(X) T(W)^T        dX = T(dY) T(W)        dW = T(dY)^T T(X)

T keeps m of the 7 bits of a BF16 mantissa: E8M7 is BF16, E8M3 has E4M3's relative precision without its range or
scales. As in arXiv 2405.18710 the other bits are truncated, so that |T(x)| <= |x|; `nearest` rounds to nearest, ties
to even. This isolates the effect of the mantissa from those of range and scales.

No compiled kernel implements these formats: on a GPU torch.compile compiles the reference implementation, and the
GEMMs run on BF16 tensor cores.
"""

from __future__ import annotations

import torch

from lowprec_train.numerics.formats import Format, Rounding, parse_rounding, register_format, register_rounding
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.recipe import Gemm, LinearRecipe

BF16_BITS = 7
FORMATS = {
    bits: register_format(
        Format(
            name=f"E8M{bits}",
            carrier=torch.bfloat16,
            max=(2 - 2.0**-bits) * 2.0**127,
            mantissa_bits=bits,
            min_exponent=-126,
        )
    )
    for bits in range(1, BF16_BITS)
}
TRUNCATE = register_rounding(Rounding(name="truncate", rule=lambda steps, bits: steps.trunc()))


def recipe(*, mantissa_bits: int = 3, rounding: str = "truncate") -> LinearRecipe:
    """mantissa_bits: m, 7 is BF16 bit for bit. rounding: "truncate" or "nearest". ValueError for m beyond 1 to 7."""
    if mantissa_bits == BF16_BITS:
        return LinearRecipe()
    if mantissa_bits not in FORMATS:
        raise ValueError(f"mantissa_bits is 1 to {BF16_BITS}, not {mantissa_bits}")
    operand = Quantizer(FORMATS[mantissa_bits], rounding=parse_rounding(rounding))
    both = Gemm(a=operand, b=operand)
    return LinearRecipe(fprop=both, dgrad=both, wgrad=both)
