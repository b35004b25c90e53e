"""The output projection, and the loss in chunks of tokens, with the logits of only one chunk in memory.

    for each chunk of rows of x:   logits = x W^T;  losses;  g = d loss / d logits, in place of the logits
                                   dx = g W         dW += g^T x, in FP32

Gradients are computed in the forward pass, for a loss gradient of 1, while the logits of a chunk exist (Liger Kernel,
arXiv 2410.10989), so no GEMM is computed twice. Backward multiplies them by the actual loss gradient; if it is 1, no
bit changes. The loss and dx equal those of all tokens at once if GEMMs give a row the same bits for any number of rows;
dW is a sum over chunks in order, rounded once.

Shapes: M tokens, D model width, V words, or a tensor-parallel rank's share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from lowprec_train.group import all_gather_rows
from lowprec_train.model.loss import CrossEntropy
from lowprec_train.precision.gemm import add_product
from lowprec_train.precision.linear import Linear


class Head(Linear):
    """x [..., D] -> logits [..., V], under the recipe."""

    def forward(  # type: ignore[override]
        self, x: Tensor, *args: Any, loss: Callable[[Tensor, Tensor], Tensor] | None = None, **options: Any
    ) -> Any:
        """loss: a function of x [M, D] and the weight [V, D] in x's dtype, whose result is returned instead of logits.
        The head must not quantise (`train.exclusions`).
        """
        if loss is None:
            return super().forward(x, *args, **options)
        assert self.recipe.is_identity
        x_MD = x.flatten(end_dim=-2)
        if self.split is not None:
            x_MD = all_gather_rows(x_MD, self.split.group)
        weight_VD = self.weight if self.gathered is None else self.gathered.tensors[0]
        return loss(x_MD, weight_VD.to(x.dtype))


class TiedHead(Head):
    """The output projection of a tied model: a Linear with the embedding's weight.

    It has no parameter: a shared parameter would be separated by `to_empty` and saved twice.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, bias=False, device="meta")
        del self.weight
        self._embedding = (embedding,)  # in a tuple: not a submodule of this one

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._embedding[0].weight


def chunked_loss(
    x_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    normalizer: Tensor | float,
    cross_entropy: CrossEntropy,
    *,
    tokens: int,
) -> Tensor:
    """`cross_entropy` of x W^T in chunks of tokens: 0-dim FP32. A second backward pass raises an error."""
    loss: Tensor = _ChunkedLoss.apply(
        x_MD, weight_VD, targets_M, normalizer, cross_entropy, tokens, torch.is_grad_enabled()
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """(x [M, D], weight [V, D], targets [M]) -> sum of the token losses / normalizer."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        normalizer: Tensor | float,
        cross_entropy: CrossEntropy,
        tokens: int,
        trained: bool,
    ) -> Tensor:
        scale = (torch.ones((), device=x_MD.device) / normalizer).float()
        dx_MD = torch.empty_like(x_MD) if trained else x_MD
        dw_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=x_MD.device) if trained else None
        found = []
        for x, dx, targets in zip(*(each.split(tokens) for each in (x_MD, dx_MD, targets_M)), strict=True):
            logits = x @ weight_VD.t()
            losses, lse = cross_entropy.losses(logits, targets)
            found.append(losses)
            if dw_VD is not None:
                cross_entropy.become_gradients(logits, targets, lse, scale)
                torch.mm(logits, weight_VD, out=dx)
                add_product(dw_VD, logits.t(), x)
        if dw_VD is not None:
            ctx.save_for_backward(dx_MD, dw_VD.to(weight_VD.dtype))
        return (torch.cat(found).sum() / normalizer).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_MD, dw_VD = (saved.detach().mul_(gradients[0]) for saved in ctx.saved_tensors)
        return dx_MD, dw_VD, None, None, None, None, None
