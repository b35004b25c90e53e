"""The random Hadamard transform: spreads an outlier over its block without changing the product.

    a' = a diag(s) H_g,   b' = b diag(s) H_g,   a' b'^T = a b^T   since H_g diag(s) diag(s) H_g^T = I

Each GEMM has one sign vector, shared by all blocks and both operands, along the reduction dimension (arXiv 2502.20586,
section 3.2).

In half precision, a GPU computes two sums per instruction. There, operands are multiplied by powers of two whose
product is 1/g, in place of g^-1/2 each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.numerics.draws import Operand


@dataclass(frozen=True)
class RandomHadamard:
    """block: length g of the transform, a power of two in [2, 256]. half: in half precision, else in FP32. Raises
    ValueError for other blocks.
    """

    block: int = 64
    half: bool = False

    def __post_init__(self) -> None:
        if self.block not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"a Hadamard block is a power of two from 2 to 256, not {self.block}")

    def __str__(self) -> str:
        return f"RHT {self.block}" + (" in FP16" if self.half else "")

    def check(self, k: int) -> None:
        """Raises ValueError if the block does not divide the reduction dimension."""
        if k % self.block:
            raise ValueError(f"a Hadamard block of {self.block} does not divide the reduction dimension {k}")

    def gain(self, operand: Operand) -> float:
        """Return the factor of an operand after sums and differences in half precision."""
        binades = self.block.bit_length() - 1
        return 2.0 ** -(binades // 2 if operand is Operand.A else binades - binades // 2)

    def __call__(self, x: Tensor, seed: Tensor, operand: Operand = Operand.A) -> Tensor:
        """x [m, k] -> FP32 [m, k]. seed: 0-dim int64, the same for both operands of a GEMM. Raises ValueError as
        `check`.
        """
        self.check(x.shape[1])
        if self.half:
            return torch.ops.lowprec.hadamard_half(x, seed, self.block, self.gain(operand))
        return torch.ops.lowprec.hadamard(x, seed, self.block)
