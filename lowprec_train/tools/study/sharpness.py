"""Sharpness of the loss around the logits of the last token of each sequence (arXiv 2405.18710, 1609.04836).

    phi = 100 (max L(z) - L(y)) / (1 + L(y)),    |z_i - y_i| <= epsilon (|y_i| + 1)

L is the mean cross-entropy over sequences, y the logits of their last tokens. phi can grow before the loss of a run
diverges. The papers search for the maximum with L-BFGS-B. Here it is exact: the cross-entropy decreases with the logit
of the target and increases with all others, so the maximum is at the corner where the target's logit is lowest and the
others are highest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lowprec_train.data.loader import Batch
from lowprec_train.model.transformer import Transformer

EPSILON = 1e-3  # arXiv 1609.04836


def losses(logits_BV: Tensor, targets_B: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row at the logits and its maximum in the box around them, both FP64 [B]."""
    y, target = logits_BV.double(), F.one_hot(targets_B, logits_BV.shape[1])
    worst = y + epsilon * (y.abs() + 1) * (1 - 2 * target)
    return F.cross_entropy(y, targets_B, reduction="none"), F.cross_entropy(worst, targets_B, reduction="none")


@torch.inference_mode()
def sharpness(model: Transformer, batches: Iterable[Batch], device: torch.device, epsilon: float = EPSILON) -> float:
    """Return phi over the sequences of these batches; not finite if the loss is not finite."""
    found = []
    for batch in batches:
        documents = None if batch.documents is None else batch.documents.to(device)
        last = model.hidden(batch.tokens.to(device), documents)[:, -1:].contiguous()
        found.append(torch.stack(losses(model.head(last)[:, 0], batch.targets[:, -1].to(device), epsilon)))
    plain, worst = torch.cat(found, dim=1).mean(dim=1).tolist()
    return 100 * (worst - plain) / (1 + plain)
