"""Text generation: sample the next token from the model's distribution, and repeat.

    p = softmax(logits / temperature);   token ~ p restricted to its nucleus

The nucleus is the smallest set of likeliest tokens whose probabilities sum to top_p or more (arXiv 1904.09751).
Temperature 0, or one below FP32's smallest normal number, selects the most likely token. The prompt is processed in one
pass; each further token needs a pass over one token, with the cached keys and values of earlier ones (`model.cache`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of sampling. The same seed, model and prompt give the same tokens.

    Raises ValueError for a temperature that is negative or not finite, top_p outside of (0, 1], and a seed of over 64
    bits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be a number, 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must lie above 0 and not above 1")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed {self.seed} must fit into 64 bits")

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Sample a token id. generator: on the CPU, so that a seed gives the same ids on all devices. Raises ValueError
        for NaN.
        """
        logits_V = logits_V.float().cpu()
        if not logits_V.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights overflow under this recipe")
        if self.temperature < torch.finfo(torch.float32).tiny:
            return int(logits_V.argmax())
        below_V = logits_V - logits_V.max()  # a small temperature makes these -inf, and would make logits inf
        probability_V = nucleus((below_V / self.temperature).softmax(dim=-1), self.top_p)
        return int(torch.multinomial(probability_V, 1, generator=generator))


def nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """Set probabilities outside the nucleus to 0, without normalising."""
    ordered_V, words_V = probability_V.sort(descending=True, stable=True)
    likelier_V = ordered_V.cumsum(dim=-1) - ordered_V  # what comes before each
    inside_V = likelier_V < top_p
    inside_V[..., 0] = True  # also if top_p is 0 in FP32
    return torch.zeros_like(probability_V).scatter(-1, words_V, ordered_V.where(inside_V, 0.0))


def check_length(prompt: int, max_tokens: int, max_seq_len: int) -> None:
    """Raises ValueError for an empty prompt, and if prompt and new tokens exceed the length of the model."""
    if prompt < 1 or max_tokens < 1:
        raise ValueError(f"a prompt of {prompt} tokens and {max_tokens} to generate: both must be at least 1")
    if prompt + max_tokens > max_seq_len:
        raise ValueError(
            f"a prompt of {prompt} tokens and {max_tokens} to generate are {prompt + max_tokens}; the model has "
            f"positions for {max_seq_len}"
        )


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the ids after the prompt, one by one: up to `max_tokens`, or until `stop`, which is not included.

    vocab_size: of the tokenizer, whose ids alone are sampled. A model may have more, to pad its embedding. None: all.
    Raises ValueError before the first token, see `check_length`.
    """
    check_length(len(prompt), max_tokens, model.max_seq_len)
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = model.new_cache(batch=1, tokens=len(prompt) + max_tokens)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(max_tokens):
        last_D = model.hidden(tokens, cache=cache)[:, -1:]
        token = sampling.choose(model.head(last_D)[0, -1, :vocab_size], generator)
        if token == stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)
