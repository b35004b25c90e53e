"""Errors of FP4 products on FP8 tensor cores, relative to FP64 products of the same codes.

Products of E2M1 codes are multiples of 1/4 up to 36, so their sums are exact while the accumulator can represent them.
Sums of codes with a nonzero mean grow with K and exceed it first. MXFP4 blocks whose exponents span 12 binades are
folded exactly into FP8 carriers (docs/numerics.md); errors of their products come from the accumulator. FOLD3's blocks
fold into E4M3 in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowprec_train.numerics.corrections import Candidates
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantized, Quantizer, ScaleRule
from lowprec_train.ops import tensor_cores
from lowprec_train.ops.ladder import SPAN
from lowprec_train.tools.bench.result import cause

LENGTHS = (2048, 4096, 11008, 16384)
SIDE, BINADES, SPANS = 1024, 12, (28, 14)  # span of a in E5M2, of b in E4M3

Operands = tuple[Quantized, Quantized]


def measure(device: torch.device, *, lengths: Sequence[int] = LENGTHS, side: int = SIDE) -> list[dict[str, Any]]:
    """Return one row per case and reduction length: relative error with fast and with split accumulation, and `output`,
    the error of rounding the exact result to the output's dtype.
    """
    rows = []
    for name, make, dtype in cases():
        for k in lengths:
            torch.manual_seed(k)
            row: dict[str, Any] = {"case": name, "k": k, "m": side, "n": side}
            try:
                row |= _errors(*make(side, k, device), dtype)
            except Exception as error:  # a GPU without FP8
                row["error"] = cause(error)
            rows.append(row)
    return rows


def cases() -> Iterator[tuple[str, Callable[[int, int, torch.device], Operands], torch.dtype]]:
    """Yield (name, operands of side x k, output dtype)."""
    yield "E2M1 codes, unit scales, FP32 output", _unit(0.0), torch.float32
    yield "E2M1 codes with a mean, unit scales, FP32 output", _unit(1.0), torch.float32
    yield "E2M1 codes, row-wise scales, BF16 output", _rows, torch.bfloat16
    yield "MXFP4 over 12 binades, folded, BF16 output", _folded, torch.bfloat16
    yield "FOLD3 carriers, unit scales, FP32 output", _ladder(unit=True), torch.float32
    yield "FOLD3, row-wise scales, BF16 output", _ladder(unit=False), torch.bfloat16


def _errors(a: Quantized, b: Quantized, dtype: torch.dtype) -> dict[str, Any]:
    exact = a.dequantize().double() @ b.dequantize().double().t()
    row: dict[str, Any] = {"output": relative(exact.to(dtype), exact)}
    for name, split in (("fast", False), ("split", True)):
        product = tensor_cores.multiply(a.codes, a.scale, b.codes, b.scale, split, dtype)
        row[name] = relative(product, exact)
    return row


def relative(value: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((value.double() - exact).norm() / exact.norm())


def _unit(mean: float) -> Callable[[int, int, torch.device], Operands]:
    """Return codes with unit scales."""

    def make(side: int, k: int, device: torch.device) -> Operands:
        one = torch.ones(1, 1, device=device)
        quantizer = Quantizer(E2M1, tile=(1, -1))
        made = (quantizer(torch.randn(side, k, device=device) + mean) for _ in range(2))
        a, b = (Quantized(each.codes, one) for each in made)
        return a, b

    return make


def _rows(side: int, k: int, device: torch.device) -> Operands:
    quantizer = Quantizer(E2M1, tile=(1, -1))
    return quantizer(torch.randn(side, k, device=device)), quantizer(torch.randn(side, k, device=device))


def _ladder(*, unit: bool) -> Callable[[int, int, torch.device], Operands]:
    """Return carriers of ladder blocks, with row scales or without."""

    def make(side: int, k: int, device: torch.device) -> Operands:
        quantizer = Quantizer(E2M1, (1, 16), ScaleRule.LADDER, exponent_span=SPAN, candidates=Candidates.MSE)
        made = []
        for blocks in (quantizer(torch.randn(side, k, device=device)) for _ in range(2)):
            parts = (blocks.codes, blocks.parts["block"], blocks.parts["row"], None)
            folded = Quantized(*torch.ops.lowprec.fold_ladder(*parts))
            if not torch.equal(folded.dequantize(), blocks.dequantize()):
                raise ArithmeticError("folding into E4M3 is not exact")
            made.append(Quantized(folded.codes, torch.ones(1, 1, device=device)) if unit else folded)
        return made[0], made[1]

    return make


def _folded(side: int, k: int, device: torch.device) -> Operands:
    """Return folded codes. Raises ArithmeticError if folding changes a value."""
    made = []
    for exponent_span, carrier in zip(SPANS, ("E5M2", "E4M3"), strict=True):
        powers = torch.randint(-BINADES, 1, (side, k // 32), device=device).float().exp2().repeat_interleave(32, 1)
        quantizer = Quantizer(
            E2M1, tile=(1, 32), scale=ScaleRule.E8M0_FLOOR, headroom=0.75, exponent_span=exponent_span
        )
        blocks = quantizer(torch.randn(side, k, device=device) * powers)
        folded = Quantized(*torch.ops.lowprec.fold(blocks.codes, blocks.scale, carrier))
        if not torch.equal(folded.dequantize(), blocks.dequantize()):
            raise ArithmeticError(f"folding into {carrier} is not exact")
        made.append(folded)
    return made[0], made[1]
