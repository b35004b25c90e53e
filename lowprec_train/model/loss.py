"""Cross-entropy without an FP32 copy of all logits.

The head's GEMM gives the logits in BF16, N tokens by V words: at V = 128256 their FP32 copy would be the largest tensor
of the whole step. With lse_n = log sum_v exp(x_nv),

    loss = sum_n (lse_n - x_n,target) / normalizer
    d loss / d x_nv = (exp(x_nv - lse_n) - [v = target_n]) / normalizer

so forward saves the logits and one FP32 number per token, and backward overwrites the logits with their gradient, a
chunk of tokens at a time. The head's GEMM is not computed twice, and there is no second matrix of that size. Compiled,
each pass is one kernel over all tokens, with FP32 values in registers only.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowprec_train.precision.split import Split

IGNORED = -100  # a target that carries no loss

CHUNK_BYTES = 64 * 2**20  # FP32 logits of one chunk


class CrossEntropy:
    """Callable loss; `compile` replaces the chunks of the eager form by fused kernels over all tokens.

    split: position of a rank's share of the vocabulary, if logits are sharded. Ranks exchange two numbers per token,
    and all compute the same bits.
    """

    split: Split | None = None

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes: int | None = chunk_bytes
        self.token_losses: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = token_losses
        self.token_parts: Callable[[Tensor, Tensor, int], Tensor] = token_parts
        self.become_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], None] = become_gradient

    def compile(self, **options: Any) -> None:
        """Compile both passes with torch.compile(**options)."""
        self.chunk_bytes = None
        self.token_losses = torch.compile(token_losses, fullgraph=True, **_whole_rows(options))
        self.token_parts = torch.compile(token_parts, fullgraph=True, **_whole_rows(options))
        self.become_gradient = torch.compile(become_gradient, fullgraph=True, **options)

    @property
    def first(self) -> int:
        """The word of the first logit."""
        return 0 if self.split is None else self.split.first

    def losses(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and log-sum-exp over the whole vocabulary, [N] FP32 each."""
        tokens, vocab = logits_NV.shape
        chunks = zip(*(each.split(self.rows(vocab, tokens)) for each in (logits_NV, targets_N)))
        if self.split is None:
            losses, lse = (torch.cat(parts) for parts in zip(*(self.token_losses(*chunk) for chunk in chunks)))
            return losses, lse
        parts_2N = torch.cat([self.token_parts(logits, targets, self.first) for logits, targets in chunks], dim=1)
        return joined(self.split.group.all_gather(parts_2N.unsqueeze(0)), targets_N)

    def become_gradients(self, logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, scale: Tensor) -> None:
        """Overwrite logits with their gradients. scale: gradient of the sum of the losses."""
        tokens, vocab = logits_NV.shape
        parts = (each.split(self.rows(vocab, tokens)) for each in (logits_NV, targets_N, lse_N))
        for logits, targets, lse in zip(*parts, strict=True):
            self.become_gradient(logits, targets, lse, scale, self.first)

    def rows(self, vocab_size: int, tokens: int) -> int:
        """Number of tokens of a chunk."""
        return tokens if self.chunk_bytes is None else max(1, self.chunk_bytes // (4 * vocab_size))

    def __call__(self, logits: Tensor, targets: Tensor, normalizer: Tensor | float) -> Tensor:
        """Return the sum of the token losses / normalizer: 0-dim FP32.

        logits [..., V]: backward overwrites them with their gradient, so a second backward pass raises an error.
        targets [...] int64; -100 excludes a token. normalizer: a number or a 0-dim tensor on the device.
        """
        return _Loss.apply(logits.flatten(0, -2), targets.flatten(), normalizer, self)


class _Loss(torch.autograd.Function):
    """(logits [N, V], targets [N]) -> sum of the token losses / normalizer."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, normalizer: Tensor | float, loss: CrossEntropy
    ) -> Tensor:
        losses, lse = loss.losses(logits_NV, targets_N)
        ctx.save_for_backward(logits_NV, targets_N, lse)
        ctx.loss, ctx.normalizer = loss, normalizer
        return (losses.sum() / normalizer).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, targets_N, lse_N = (saved.detach() for saved in ctx.saved_tensors)
        ctx.loss.become_gradients(logits_NV, targets_N, lse_N, (gradients[0] / ctx.normalizer).float())
        torch.autograd.graph.increment_version(logits_NV)  # a compiled kernel writes unseen
        return logits_NV, None, None, None


def _whole_rows(options: dict[str, Any]) -> dict[str, Any]:
    """Keep a row in one thread block: below 8448 tokens Inductor would split it and read the logits twice."""
    if options.get("backend", "inductor") != "inductor" or "mode" in options:
        return options
    return options | {"options": {"split_reductions": False} | options.get("options", {})}


def token_losses(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exp of some tokens, [N] FP32 each; the loss is 0 for the target -100."""
    lse_N = logits_NV.float().logsumexp(dim=-1)
    chosen_N = logits_NV.gather(-1, targets_N.clamp(min=0)[:, None]).squeeze(-1).float()
    return (lse_N - chosen_N).masked_fill(targets_N == IGNORED, 0.0), lse_N


def token_parts(logits_NV: Tensor, targets_N: Tensor, first: int) -> Tensor:
    """Return [2, N] FP32: log-sum-exp over a share of the vocabulary from word `first` on, and the target's logit if it
    is in that share, else 0.
    """
    local_N = targets_N - first
    here_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
    chosen_N = logits_NV.gather(-1, local_N.where(here_N, 0)[:, None]).squeeze(-1).float()
    return torch.stack((logits_NV.float().logsumexp(dim=-1), chosen_N.where(here_N, 0.0)))


def joined(parts_R2N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the parts of all ranks to the result of `token_losses`."""
    lse_N, chosen_N = parts_R2N[:, 0].logsumexp(dim=0), parts_R2N[:, 1].sum(dim=0)
    return (lse_N - chosen_N).masked_fill(targets_N == IGNORED, 0.0), lse_N


def become_gradient(logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, scale: Tensor, first: int = 0) -> None:
    """logits <- (softmax(logits) - onehot(targets)) * scale, 0 where ignored; rounded once to their dtype. first: the
    word of the first logit.
    """
    scale_N = torch.where(targets_N == IGNORED, 0.0, scale)
    probability_NV = logits_NV.float().sub_(lse_N[:, None]).exp_()
    words_V = torch.arange(first, first + logits_NV.shape[-1], device=logits_NV.device)
    probability_NV.add_(words_V == targets_N[:, None], alpha=-1).mul_(scale_N[:, None])
    logits_NV.copy_(probability_NV)
