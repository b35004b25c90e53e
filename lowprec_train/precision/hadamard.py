"""The random Hadamard transform: spreads an outlier over its block without changing the product.

    a' = a diag(s) H_g,   b' = b diag(s) H_g,   a' b'^T = a b^T   since H_g diag(s) diag(s) H_g^T = I

Each GEMM has one sign vector, shared by all blocks and both operands, along the reduction dimension (arXiv 2502.20586,
section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomHadamard:
    """block: length g of the transform, a power of two in [2, 256]. Raises ValueError otherwise."""

    block: int = 64

    def __post_init__(self) -> None:
        if self.block not in (2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"a Hadamard block is a power of two from 2 to 256, not {self.block}")

    def check(self, k: int) -> None:
        """Raises ValueError if the block does not divide the reduction dimension."""
        if k % self.block:
            raise ValueError(f"a Hadamard block of {self.block} does not divide the reduction dimension {k}")

    def __call__(self, x: Tensor, seed: Tensor) -> Tensor:
        """x [m, k] -> FP32 [m, k]. seed: 0-dim int64, the same for both operands of a GEMM. Raises ValueError as
        `check`.
        """
        self.check(x.shape[1])
        return torch.ops.lowprec.hadamard(x, seed, self.block)
