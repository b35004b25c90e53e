"""Perplexity and bits per byte.

    nll = -sum_t log p(t | preceding tokens of its window)        over all predicted tokens, nats

    perplexity = exp(nll / tokens)        bits per byte = nll / (log 2 * bytes of text)

Perplexity compares models with the same tokenizer; bits per byte compares any models on the same text. Losses are
computed in FP32 from logits in the model's dtype and summed in FP64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from lowprec_train.model.loss import IGNORED
from lowprec_train.model.transformer import Transformer
from lowprec_train.tools.evaluate.texts import Encoded, Source
from lowprec_train.tools.evaluate.windows import Window, cut, of_equal_length


@dataclass(frozen=True)
class Scored:
    """Score of one window. nll: sum of the losses of its scored tokens in nats. greedy: all of them were the argmax."""

    nll: float
    greedy: bool


@torch.inference_mode()
def score(model: Transformer, windows: Sequence[Window]) -> list[Scored]:
    """Score windows of equal length in one forward pass. Raises ValueError if a loss is not finite."""
    tokens = torch.from_numpy(np.stack([window.tokens for window in windows])).to(model.embedding.weight.device)
    targets = tokens[:, 1:].clone()
    for row, window in enumerate(windows):
        targets[row, : window.inputs - window.scored] = IGNORED
    logits = model.logits(tokens[:, :-1].contiguous())
    losses, _ = model.cross_entropy.losses(logits.flatten(0, 1), targets.flatten())
    sums = losses.view_as(targets).double().sum(dim=1).tolist()
    if not all(map(math.isfinite, sums)):
        raise ValueError("the model's losses are not finite: its weights overflow under this recipe")
    likeliest = ((logits.argmax(dim=-1) == targets) | (targets == IGNORED)).all(dim=1).tolist()
    return [Scored(*each) for each in zip(sums, likeliest, strict=True)]


def score_all(
    model: Transformer,
    windows: Iterable[Window],
    batch: int,
    report_tokens: Callable[[int], None] = lambda tokens: None,
) -> list[Scored]:
    """Score windows, at most `batch` of equal length in one forward pass. Returns the scores in the order of `windows`.

    report_tokens: called with the number of tokens predicted since the last call.
    """
    found: dict[int, Scored] = {}
    for group in of_equal_length(enumerate(windows), batch, lambda item: item[1].inputs):
        numbers, together = zip(*group, strict=True)
        found |= zip(numbers, score(model, together), strict=True)
        report_tokens(sum(window.scored for window in together))
    return [found[number] for number in range(len(found))]


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Options for cutting text into windows.

    start: token id that precedes each document; None: the document's first token is context only and not predicted.
    documents: maximum number of documents, None for all.
    """

    seq_len: int
    stride: int
    batch: int
    start: int | None
    documents: int | None = None

    def windows(self, document: Encoded) -> list[Window]:
        """Windows of one document."""
        ids = document.ids if self.start is None else np.concatenate([[self.start], document.ids])
        return list(cut(ids, self.seq_len, self.stride))

    def taken(self, source: Source, vocab_size: int) -> Iterator[Encoded]:
        """The documents to evaluate. Raises ValueError for a token id outside the model's vocabulary."""
        for number, document in enumerate(islice(source, self.documents)):
            if (wrong := document.ids[(document.ids < 0) | (document.ids >= vocab_size)]).size:
                raise ValueError(
                    f"{source.name}: document {number} has token id {wrong[0]}, but the model's vocabulary "
                    f"has {vocab_size} tokens"
                )
            yield document


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The losses of a text.

    documents: number of documents with at least one predicted token. bytes: UTF-8 bytes of these documents, None if
    unknown. tokens: number of predicted tokens. nll: nats of each window, in text order. seconds: computing time.
    """

    documents: int
    bytes: int | None
    tokens: int
    nll: NDArray[np.float64]
    seconds: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nll.sum()) / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return float(self.nll.sum()) / (math.log(2) * self.bytes) if self.bytes else None

    def figures(self) -> dict[str, float | None]:
        """Results by name, for JSON."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens_per_second": self.tokens / self.seconds,
        }


def measure(
    model: Transformer,
    source: Source,
    cutting: Cutting,
    report_tokens: Callable[[int], None] = lambda tokens: None,
) -> Measured:
    """Compute the losses of all documents. report_tokens: as in `score_all`.

    Raises ValueError if the text has no token to predict.
    """
    documents, tokens, read = 0, 0, 0
    size: int | None = 0

    def windows() -> Iterator[Window]:
        nonlocal documents, size, tokens, read
        for document in cutting.taken(source, model.vocab_size):
            read += len(document.ids) > 0
            if found := cutting.windows(document):
                documents += 1
                size = None if size is None or document.bytes is None else size + document.bytes
                tokens += sum(window.scored for window in found)
                yield from found

    began = time.perf_counter()
    nll = np.array([each.nll for each in score_all(model, windows(), cutting.batch, report_tokens)])
    if not len(nll):
        why = "its documents have a single token, which --start none only reads" if read else "no text"
        raise ValueError(f"{source.name}: {why}, so there is no token to predict")
    return Measured(documents=documents, bytes=size, tokens=tokens, nll=nll, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class Difference:
    """Mean loss difference between two recipes on the same windows, in nats per token, with its standard error.

    The losses of the two recipes are correlated, so the difference is more precise than either loss. standard_error is
    None for a single window.
    """

    nats: float
    standard_error: float | None


def difference(of: Measured, to: Measured) -> Difference:
    """The difference `of` - `to`."""
    each, tokens = of.nll - to.nll, of.tokens
    error = math.sqrt(len(each)) * float(each.std(ddof=1)) / tokens if len(each) > 1 else None
    return Difference(float(each.sum()) / tokens, error)
