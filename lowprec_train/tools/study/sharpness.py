"""How steep the loss is around the logits of a sequence's last token (arXiv 2405.18710, after arXiv 1609.04836).

    phi = 100 (max L(z) - L(y)) / (1 + L(y)),    |z_i - y_i| <= epsilon (|y_i| + 1)

L is the mean cross-entropy over sequences, y the logits of their last tokens. It grows before runs diverge that do not
show it in their loss yet. The published value is searched for by L-BFGS-B, but the maximum is known: the cross-entropy
falls with the target's logit and grows with every other one, so it lies in the corner where that one is lowest and the
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
    """Cross-entropies of each row [B], FP64: at the logits, and the largest within the box around them."""
    y, target = logits_BV.double(), F.one_hot(targets_B, logits_BV.shape[1])
    worst = y + epsilon * (y.abs() + 1) * (1 - 2 * target)
    return F.cross_entropy(y, targets_B, reduction="none"), F.cross_entropy(worst, targets_B, reduction="none")


@torch.inference_mode()
def sharpness(model: Transformer, batches: Iterable[Batch], device: torch.device, epsilon: float = EPSILON) -> float:
    """phi over the sequences of these batches; not finite where the model's loss is not."""
    found = []
    for batch in batches:
        documents = None if batch.documents is None else batch.documents.to(device)
        last = model.hidden(batch.tokens.to(device), documents)[:, -1:].contiguous()
        found.append(torch.stack(losses(model.head(last)[:, 0], batch.targets[:, -1].to(device), epsilon)))
    plain, worst = torch.cat(found, dim=1).mean(dim=1).tolist()
    return 100 * (worst - plain) / (1 + plain)
