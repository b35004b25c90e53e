"""Outlier clamping and compensation (OCC, arXiv 2501.17116, section 3.2): four bits for the body, more for the few.

Per token, the values outside the quantiles [1 - q, q] are outliers. The E2M1 scale follows the clamped body; outliers
come back in one of two ways:

    carrier     rounded once to E4M3 in the FP8 code that carries E2M1 anyway: no second GEMM, but they meet a 4-bit W
    residual    the paper's: R = A - clamp(A) is kept sparsely and multiplies the BF16 weight
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.numerics.quantizer import Quantized, Quantizer

VARIANTS = ("carrier", "residual")


@dataclass(frozen=True)
class Residual:
    """R as its non-zeros: values FP32 [m, 2c] at columns int64 [m, 2c] of a matrix with k columns; positions may repeat
    with value 0.
    """

    values: Tensor
    columns: Tensor
    k: int

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[m, k]; a repeated position counts once."""
        zeros = self.values.new_zeros((self.values.shape[0], self.k))
        return zeros.scatter_add(1, self.columns, self.values).to(dtype)


@dataclass(frozen=True)
class OutlierClamp:
    """quantile: q in (0.5, 1]; 1 clamps nothing. variant: "carrier" or "residual". Raises ValueError for others."""

    quantile: float = 0.99
    variant: str = "carrier"

    def __post_init__(self) -> None:
        if not 0.5 < self.quantile <= 1:
            raise ValueError(f"an outlier quantile lies in (0.5, 1], not at {self.quantile}")
        if self.variant not in VARIANTS:
            raise ValueError(f"unknown outlier variant {self.variant!r}; variants are {', '.join(VARIANTS)}")

    def clipped(self, k: int) -> int:
        """How many values of a row of k are clamped on each side."""
        return math.floor((1 - self.quantile) * k + 1e-9)

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp limits of each row of x [m, k]: (low, high), FP32 [m, 1]."""
        return torch.ops.lowprec.outlier_bounds(x, self.clipped(x.shape[1]))

    def __call__(
        self, x: Tensor, quantizer: Quantizer, seed: Tensor | None, origin: Tensor | None
    ) -> tuple[Quantized, Residual | None]:
        """x [m, k] -> codes of the body (with the outliers in the carrier), and the residual of the other variant."""
        if self.variant == "carrier":
            return Quantized(*torch.ops.lowprec.quantize_outliers(x, self.clipped(x.shape[1]))), None
        low, high = self.bounds(x)
        x = x.float()
        body = torch.minimum(torch.maximum(x, low), high)
        return quantizer(body, seed, origin), self._residual(x, body)

    def _residual(self, x: Tensor, body: Tensor) -> Residual:
        rest, clipped = x - body, self.clipped(x.shape[1])
        columns = torch.cat(
            [rest.topk(clipped, dim=1).indices, rest.topk(clipped, dim=1, largest=False).indices], dim=1
        )
        values = rest.gather(1, columns)
        sign = (
            torch.arange(2 * clipped, device=x.device) < clipped
        )  # first half holds what is above, second what is below
        return Residual(torch.where(sign, values.clamp_min(0), values.clamp_max(0)), columns, x.shape[1])
