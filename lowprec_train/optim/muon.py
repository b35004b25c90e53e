"""Muon (Keller Jordan, 2024, kellerjordan.github.io/posts/muon; arXiv 2502.16982): orthogonalised momentum.

    m' = m + (1 - mu) (g - m),     u = g + mu (m' - g) with Nesterov, else m'
    O  = NS(u),  the orthogonal factor of u up to singular values of about 0.7 to 1.2
    w' = w (1 - lr weight_decay) - lr c O

NS is the quintic Newton-Schulz iteration X <- a X + (b A + c A A) X, A = X X^T, from X = u / |u|, in BF16 on whole
matrices: shards are gathered, and every rank computes the same bits and uses its own part. `adjust_lr` selects c for a
matrix [n, k]: `original` is sqrt(max(1, n / k)); `match_rms_adamw` is 0.2 sqrt(max(n, k)), which gives updates the RMS
of AdamW's, so that AdamW's learning rate and decay apply (arXiv 2502.16982, section 2.2).

Muon updates hidden matrices; AdamW updates vectors, embeddings and the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowprec_train.ops.codecs import Values
from lowprec_train.ops.updates import Rule, Step

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Chosen for the steepest slope at zero that still converges into a band around one (Keller Jordan, 2024)."""
EPS = 1e-7


@dataclass(frozen=True, kw_only=True)
class Muon(Rule):
    """Muon's rule. momentum: mu in [0, 1). iterations: of Newton-Schulz. Raises ValueError for a value out of range."""

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    moments = ("momentum",)
    hidden_matrices_only = True
    gathers = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if not 1 <= self.iterations < 100:
            raise ValueError(f"iterations must lie in [1, 99], got {self.iterations}")
        if self.adjust_lr not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr must be original or match_rms_adamw, got {self.adjust_lr!r}")

    @property
    def decays(self) -> Mapping[str, float]:
        return {"momentum": self.momentum}

    def new_moments(self, old: Values, gradient: Tensor, step: Step) -> Values:
        return {"momentum": old["momentum"] + (gradient - old["momentum"]) * (1.0 - self.momentum)}

    def new_weight(self, old: Values, new: Values, gradient: Tensor, step: Step) -> Tensor:
        m = new["momentum"]
        update = step.gather((gradient + (m - gradient) * self.momentum if self.nesterov else m).bfloat16())
        rows, columns = update.shape
        larger = {"original": max(1.0, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
        direction = step.shard(orthogonalised(update, self.iterations)).float()
        return old["master"] * (1.0 - step.lr * step.weight_decay) - direction * (step.lr * larger[self.adjust_lr])


def orthogonalised(x: Tensor, iterations: int) -> Tensor:
    """Return x [n, k] with singular values near one, by Newton-Schulz in the dtype of x."""
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    x = x.t().contiguous() if tall else x  # the same bits for x and its transpose, whatever the GEMM's kernels
    x = x / x.norm().clamp(min=EPS)
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t().contiguous() if tall else x
