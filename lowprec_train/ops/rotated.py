"""MXFP4 operand in one op: rotate, round stochastically in blocks of 32, fold the block exponents into the carrier.

    codes * scale = fold(Q_E2M1(H diag(s) x))            along the rows of x, or of x^T

(arXiv 2502.20586). The fused op writes no intermediate results to memory; `hadamard`, `quantize` and `fold` one after
another give the same bits.
"""

from __future__ import annotations

import torch

from lowprec_train.ops import reference

BLOCK = 32  # elements of an MX block


def rotate_fold(  # type: ignore[no-untyped-def]
    x,
    scale,
    transposed,
    signs,
    rotation,
    scale_rule,
    headroom,
    exponent_span,
    carrier,
    rounding,
    seed,
    origin,
    after=None,
):
    """Return carrier codes and a scale per row of x [m, k] or of its transpose. With `scale` [1, 1] x is E4M3 codes,
    which are first decoded to BF16. signs: seed of the rotation's signs; rotation: its block size, 0 for none.
    rounding, seed, origin: as in `quantize`.
    """
    if scale is not None:
        x = (reference.to_float(x) * scale).to(torch.bfloat16)
    x = x.t().contiguous() if transposed else x
    x = reference.hadamard(x, signs, rotation) if rotation else x
    how = (scale_rule, headroom, exponent_span, rounding, seed, origin)
    return reference.fold(*reference.quantize(x, "E2M1", (1, BLOCK), *how), carrier)
