"""Perplexity and bits per byte.

    nll = -sum_t log p(t | what its window holds before it)        over all predicted tokens, nats

    perplexity = exp(nll / tokens)        bits per byte = nll / (log 2 * bytes of text)

Perplexity compares models of one tokenizer; bits per byte compares any two on the same text. A token's loss is taken
in FP32 from logits in the model's dtype, sums are in FP64.
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
from lowprec_train.tools.evaluate.windows import Window, cut, of_equal_length, stacked


@dataclass(frozen=True)
class Scored:
    """One window: the sum of its counted tokens' losses in nats, and whether each of them was the likeliest."""

    nll: float
    greedy: bool


@torch.inference_mode()
def score(model: Transformer, windows: Sequence[Window]) -> list[Scored]:
    """Losses of windows of equal length, computed together. ValueError where they are not finite."""
    tokens = torch.from_numpy(stacked(windows)).to(model.embedding.weight.device)
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


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How text becomes windows. start: the token put before each document; None: its own first token is context only
    and is not predicted. documents: of the text, at most; None: all.
    """

    seq_len: int
    stride: int
    batch: int
    start: int | None
    documents: int | None = None

    def prefixed(self, document: Encoded) -> NDArray[np.int64]:
        return document.ids if self.start is None else np.concatenate([[self.start], document.ids])

    def windows(self, document: Encoded) -> list[Window]:
        return list(cut(self.prefixed(document), self.seq_len, self.stride))

    def taken(self, source: Source, vocab_size: int) -> Iterator[Encoded]:
        """The documents to evaluate. Raises ValueError at an id that the model has no row for."""
        for number, document in enumerate(islice(source, self.documents)):
            if len(document.ids) and document.ids.max() >= vocab_size:
                raise ValueError(
                    f"{source.name}: document {number} holds token {document.ids.max()}, and the model has {vocab_size}"
                )
            yield document


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What was predicted: documents with anything to predict, their bytes of text (None: unknown), tokens, windows."""

    documents: int
    bytes: int | None
    tokens: int
    windows: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The losses of a text. nll: nats of each window, in the order of the text; seconds: of computing."""

    extent: Extent
    nll: NDArray[np.float64]
    seconds: float

    @property
    def loss(self) -> float:
        """Nats a token."""
        return float(self.nll.sum()) / self.extent.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return float(self.nll.sum()) / (math.log(2) * self.extent.bytes) if self.extent.bytes else None


def measure(
    model: Transformer, source: Source, how: Cutting, told: Callable[[int], None] = lambda tokens: None
) -> Measured:
    """The losses of all documents. told: is given the tokens predicted so far.

    Raises ValueError for a text without anything to predict.
    """
    counted = _Counted(how, how.taken(source, model.vocab_size))
    nll: dict[int, float] = {}
    began, tokens = time.perf_counter(), 0
    for group in of_equal_length(enumerate(counted), how.batch, lambda item: item[1].inputs):
        numbers, windows = zip(*group, strict=True)
        nll |= zip(numbers, (each.nll for each in score(model, windows)), strict=True)
        tokens += sum(window.scored for window in windows)
        told(tokens)
    if not nll:
        raise ValueError(f"{source.name}: no text, nothing to predict")
    extent = Extent(documents=counted.documents, bytes=counted.bytes, tokens=tokens, windows=len(nll))
    ordered = np.array([nll[number] for number in range(len(nll))])
    return Measured(extent=extent, nll=ordered, seconds=time.perf_counter() - began)


class _Counted:
    """Windows of documents, and what has gone by."""

    def __init__(self, how: Cutting, documents: Iterable[Encoded]) -> None:
        self._how, self._given = how, documents
        self.documents = 0
        self.bytes: int | None = 0

    def __iter__(self) -> Iterator[Window]:
        for document in self._given:
            windows = self._how.windows(document)
            if windows:
                self.documents += 1
                self.bytes = None if self.bytes is None or document.bytes is None else self.bytes + document.bytes
            yield from windows


@dataclass(frozen=True)
class Difference:
    """Nats a token that one recipe loses over another on the same windows, and the standard error of that mean: losses
    of the same text go together, so the difference is known far better than either. None: of a single window.
    """

    nats: float
    standard_error: float | None


def difference(of: Measured, to: Measured) -> Difference:
    """of - to."""
    each, tokens = of.nll - to.nll, of.extent.tokens
    error = math.sqrt(len(each)) * float(each.std(ddof=1)) / tokens if len(each) > 1 else None
    return Difference(float(each.sum()) / tokens, error)
