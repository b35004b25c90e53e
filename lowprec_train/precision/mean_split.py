"""The mean split: subtracts an operand's mean over the tokens before rounding, and adds its product after the GEMM.

    X = 1 mu^T + R,  dY = 1 mu_g^T + R_g          mu, mu_g: means over the rows (tokens), so 1^T R = 1^T R_g = 0

    fprop   Y  = Q(R) Q(W)^T   + 1 (mu W^T)
    dgrad   dX = Q(R_g) Q(W)   + 1 (mu_g W)
    wgrad   dW = Q(R_g)^T Q(R) + T mu_g mu^T       the cross terms vanish before rounding; T tokens

After Averis (arXiv 2603.10444), which rounds the means to four bits too. Scales then follow the variation of tokens
instead of the offset of each channel. Means are over the GEMM's tokens, one micro-batch. They are per channel: tensor
parallelism needs no communication. FP64 sums of BF16 values are exact except for extreme ranges, so the order of tokens
does not change the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowprec_train.precision.gemm import accumulate
from lowprec_train.precision.linear_plan import LinearPlan
from lowprec_train.precision.saved import SavedOperand

TERMS = 3  # BF16 numbers that add up to an FP32 one
BF16_BITS = -0x10000  # sign, exponent and the seven bits of the mantissa that BF16 has


@dataclass(frozen=True)
class Means:
    """rest: dY minus its mean, FP32. dy, x: means over the tokens, FP32 [n] and [k]; x: None if wgrad adds no means."""

    rest: Tensor
    dy: Tensor
    x: Tensor | None = None


def without_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, channels] -> (x minus its mean FP32 [tokens, channels], the mean FP32 [channels])."""
    mean = (x.sum(dim=0, dtype=torch.float64) / x.shape[0]).float()
    return x.float() - mean, mean


def split_means(plan: LinearPlan, x: SavedOperand, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[SavedOperand, Means]:
    """Return X for wgrad, and the means that are added to the products. saved: what the forward pass saved."""
    rest, mean = without_mean(dy)
    if not plan.adds_means:
        return x, Means(rest, mean)
    if plan.saves_mean:
        return x, Means(rest, mean, saved[-1])
    x_rest, x_mean = without_mean(x.tensors[0])
    return replace(x, tensors=(x_rest,)) if plan.wgrad.b.mean_split else x, Means(rest, mean, x_mean)


def mean_product(mean: Tensor, weight: Tensor) -> Tensor:
    """mean [k], weight [n, k] -> mean W^T [n] in FP32. On a GPU the weight must be exact in BF16.

    The mean is split into three BF16 terms, which avoids an FP32 copy of the weight. The split masks bits, because a
    compiler may remove a cast to BF16 and back.
    """
    terms, rest = [], mean
    for _ in range(TERMS):
        terms.append((rest.view(torch.int32) & BF16_BITS).view(torch.float32))
        rest = rest - terms[-1]
    return accumulate(torch.stack(terms).bfloat16(), weight).sum(0)


def rank_one(dy_mean: Tensor, x_mean: Tensor, tokens: int) -> Tensor:
    """tokens * dy_mean [n] x_mean [k]^T, FP32 [n, k]."""
    return (dy_mean * tokens).unsqueeze(1) * x_mean.unsqueeze(0)
