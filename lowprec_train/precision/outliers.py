"""Outlier clamping and compensation (OCC, arXiv 2501.17116, section 3.2): four bits for most values, more for outliers.

The outliers of a token are its values outside the quantiles [1 - q, q]. The E2M1 scale is computed from the clamped
values. Outliers are restored in one of two ways:

    carrier     they are rounded once to E4M3 in the same FP8 carrier: no second GEMM, but W has 4 bits for them
    residual    as in the paper: R = A - clamp(A) is stored sparsely and multiplied by the BF16 weight
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.precision.split import Split

VARIANTS = ("carrier", "residual")


@dataclass(frozen=True)
class Residual:
    """R [m, k], stored sparsely: values FP32 [m, 2c] and their columns int64 [m, 2c]. A position may appear again with
    value 0.
    """

    values: Tensor
    columns: Tensor
    k: int

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return R [m, k] as a dense matrix."""
        zeros = self.values.new_zeros((self.values.shape[0], self.k))
        return zeros.scatter_add(1, self.columns, self.values).to(dtype)


@dataclass(frozen=True)
class OutlierClamp:
    """quantile: q in (0.5, 1]; 1 clamps nothing. variant: "carrier" or "residual". Raises ValueError for others."""

    quantile: float = 0.99
    variant: str = "carrier"

    def __post_init__(self) -> None:
        if not 0.5 < self.quantile <= 1:
            raise ValueError(f"an outlier quantile must lie in (0.5, 1], got {self.quantile}")
        if self.variant not in VARIANTS:
            raise ValueError(f"unknown outlier variant {self.variant!r}; variants are {', '.join(VARIANTS)}")

    def clipped(self, k: int) -> int:
        """Return the number of values that are clamped on each side of a row of k values."""
        return math.floor((1 - self.quantile) * k + 1e-9)

    def bounds(self, x: Tensor, split: Split | None = None) -> tuple[Tensor, Tensor]:
        """Return the clamp limits (low, high) of each row of x [m, k], FP32 [m, 1]. split: if x is a shard of rows."""
        return torch.ops.lowprec.outlier_bounds(*self._candidates(x, split))

    def _candidates(self, x: Tensor, split: Split | None) -> tuple[Tensor, int]:
        """Return values that have the clamp limits and the amax of whole rows, and how many the limits clip."""
        if split is None:
            return x, self.clipped(x.shape[1])
        clipped = self.clipped(split.whole)
        return split.group.all_gather(_extremes(x, clipped + 1), 1), clipped

    def __call__(
        self,
        x: Tensor,
        quantizer: Quantizer,
        seed: Tensor | None,
        origin: Tensor | None,
        split: Split | None = None,
    ) -> tuple[Quantized, Residual | None]:
        """Quantise x [m, k]; return codes of the clamped x and the residual.

        In the variant "carrier" the codes include the outliers, and the residual is None. split: if the columns of x
        are sharded.
        """
        candidates, clipped = self._candidates(x, split)
        if self.variant == "carrier" and split is None:
            return Quantized(*torch.ops.lowprec.quantize_outliers(x, clipped)), None
        low, high = torch.ops.lowprec.outlier_bounds(candidates, clipped)
        if self.variant == "carrier":
            amax = torch.ops.lowprec.amax(candidates, (1, -1))
            return Quantized(*torch.ops.lowprec.quantize_carrier(x, low, high, amax)), None
        x = x.float()
        body = torch.minimum(torch.maximum(x, low), high)
        shared = None if split is None else split.shared(Gemms.FPROP, Operand.A)
        return quantizer(body, seed, origin, shared), self._residual(x, body, min(clipped, x.shape[1]))

    def _residual(self, x: Tensor, body: Tensor, clipped: int) -> Residual:
        rest = x - body
        columns = torch.cat(
            [rest.topk(clipped, dim=1).indices, rest.topk(clipped, dim=1, largest=False).indices], dim=1
        )
        values = rest.gather(1, columns)
        sign = torch.arange(2 * clipped, device=x.device) < clipped  # first half: too large; second half: too small
        return Residual(torch.where(sign, values.clamp_min(0), values.clamp_max(0)), columns, x.shape[1])


def _extremes(x: Tensor, count: int) -> Tensor:
    """Return the `count` largest and `count` smallest values of each row of x; x itself if it has no more columns. NaN
    is among the largest.
    """
    if 2 * count >= x.shape[1]:
        return x
    return torch.cat([x.topk(count, dim=1).values, x.topk(count, dim=1, largest=False).values], dim=1)
