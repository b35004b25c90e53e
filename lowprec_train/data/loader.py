"""Batches as a pure function of (seed, step): packed documents, shuffled by arithmetic.

The documents of a stream lie end to end; each ends with its end-of-document token. Sample j is the seq_len + 1 tokens
from j * seq_len on. Its last token, which is only a target, is the first of the next sample, as in Megatron's
GPTDataset. A shorter tail is never read. An epoch reads every sample once, in its own order. Documents keep their order
on disk, and an epoch ends at the end of a sample.

Sequence i of step s has position s * per_step + i in the run, on any rank. The state of the loader is the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lowprec_train.data.indexed import IndexedDataset, parts
from lowprec_train.data.order import Blend, permute, shuffle_key

_COUNTED_AT_ONCE = 1 << 22  # tokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of tokens and their successors, int64 [count, seq_len] on the host.

    `documents`: the document number of each token, from 0 in each sequence (None unless requested); an end-of-document
    token belongs to the document that it ends. `first`: index of the first sequence in its step.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    first: int = 0

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with `move` applied to each tensor."""
        documents = None if self.documents is None else move(self.documents)
        return replace(self, tokens=move(self.tokens), targets=move(self.targets), documents=documents)


class Stream:
    """The tokens of a range of documents, end to end: a view of the mapped file.

    Raises:
        ValueError: the documents are not integers, or do not lie end to end in the file.
    """

    def __init__(self, source: IndexedDataset, documents: range) -> None:
        if source.dtype.kind not in "iu":
            raise ValueError(f"{source.prefix}: holds {source.dtype}, not token ids")
        self.name = source.prefix
        self._source, self._documents = source, documents
        self._itemsize = source.dtype.itemsize
        sequences = range(int(source.documents[documents.start]), int(source.documents[documents.stop]))
        _check_contiguous(source, sequences)
        self._begin = source.boundary(sequences.start) if sequences else 0
        self._end = source.boundary(sequences.stop) if sequences else 0
        self.tokens: np.ndarray = source.data[self._begin // self._itemsize : self._end // self._itemsize]

    def __len__(self) -> int:
        return len(self.tokens)

    def samples(self, seq_len: int) -> int:
        """Return the number of samples of seq_len + 1 tokens in an epoch."""
        return max(0, len(self) - 1) // seq_len

    def document_ids(self, start: int, length: int) -> np.ndarray:
        """Return the document number of each token from `start` on, counted from 0 at the first; int64 [length]."""
        begin = self._begin + start * self._itemsize
        end = begin + length * self._itemsize
        first = bisect_right(self._documents, begin, key=self._start)
        last = bisect_left(self._documents, end, key=self._start)
        starts = self._source.offsets[self._source.documents[self._documents[first:last]]]
        steps = np.zeros(length, np.int64)
        np.add.at(steps, (starts - begin) // self._itemsize, 1)
        return np.cumsum(steps)

    def _start(self, document: int) -> int:
        return self._source.boundary(int(self._source.documents[document]))


def _check_contiguous(source: IndexedDataset, sequences: range) -> None:
    for part in parts(len(sequences) - 1):
        start, stop = sequences.start + part.start, sequences.start + part.stop
        ends = source.offsets[start:stop] + source.lengths[start:stop].astype(np.int64) * source.dtype.itemsize
        apart = np.flatnonzero(ends != source.offsets[start + 1 : stop + 1])
        if apart.size:
            at = int(apart[0])
            raise ValueError(
                f"{source.prefix}.idx: sequence {start + at} ends at byte {ends[at]}, the next begins at "
                f"{source.offsets[start + at + 1]}: packing needs sequences that lie end to end"
            )


class Dataset:
    """Endless batches of `seq_len` tokens from one or several streams.

    order: the proportions of several streams, each shuffled separately; None: the streams are one set, whose samples
    are shuffled together and read once per epoch.

    Raises:
        ValueError: a stream is too short for one sample.
    """

    def __init__(
        self,
        *,
        streams: tuple[Stream, ...],
        seq_len: int,
        vocab_size: int,
        seed: int,
        order: Blend | None = None,
        document_mask: bool = False,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be positive")
        self.streams, self.seq_len, self.vocab_size, self.seed = streams, seq_len, vocab_size, seed
        self.document_mask = document_mask
        self._order = order
        self._sizes = np.array([stream.samples(seq_len) for stream in streams])
        for stream, size in zip(streams, self._sizes, strict=True):
            if not size:
                raise ValueError(
                    f"{stream.name}: {len(stream)} tokens, a sample of seq_len {seq_len} needs {seq_len + 1}"
                )

    @property
    def tokens(self) -> int:
        """Number of tokens on disk, in all streams."""
        return sum(len(stream) for stream in self.streams)

    def repeats(self, count: int) -> bool:
        """Return whether the first `count` sequences hold one twice."""
        if self._order is None:
            return bool(count > self._sizes.sum())
        source, ordinal = self._order(np.arange(count, dtype=np.int64))
        return bool((ordinal >= self._sizes[source]).any())

    def batch(self, step: int, first: int, count: int, per_step: int) -> Batch:
        """Return sequences first .. first + count - 1 of the `per_step` sequences of step `step`.

        Raises:
            ValueError: the range exceeds the step, or a token is outside the vocabulary.
        """
        if step < 0 or first < 0 or count < 1 or first + count > per_step:
            raise ValueError(f"sequences {first}..{first + count} of step {step}, which has {per_step}")
        places = step * per_step + first + np.arange(count, dtype=np.int64)
        rows = np.empty((count, self.seq_len + 1), np.int64)
        documents = np.empty((count, self.seq_len), np.int64) if self.document_mask else None
        for row, (stream, sample) in enumerate(self._samples(places)):
            start = sample * self.seq_len
            rows[row] = stream.tokens[start : start + self.seq_len + 1]
            if documents is not None:
                documents[row] = stream.document_ids(start, self.seq_len)
        self._check_vocabulary(rows)
        block = torch.from_numpy(rows)
        return Batch(
            tokens=block[:, :-1].contiguous(),
            targets=block[:, 1:].contiguous(),
            documents=None if documents is None else torch.from_numpy(documents),
        )

    def unigram_entropy(self, limit: int = 1 << 26) -> float:
        """Return the entropy of the token frequencies in nats: the loss of the best model that ignores its context.

        Streams are weighted as they are blended. A stream longer than `limit` tokens is counted in evenly spaced blocks
        with about `limit` tokens in total.
        """
        frequency = np.zeros(self.vocab_size)
        shares = self._sizes / self._sizes.sum() if self._order is None else self._order.shares
        for stream, share in zip(self.streams, shares, strict=True):
            counts = self._counts(stream.tokens, limit)
            frequency += share * counts / counts.sum()
        frequency = frequency[frequency > 0]
        return float(-(frequency * np.log(frequency)).sum())

    def _samples(self, places: np.ndarray) -> list[tuple[Stream, int]]:
        if self._order is None:
            return self._of_one_set(places)
        source, ordinal = self._order(places)
        sample = np.empty_like(ordinal)
        for number in np.unique(source):
            selected = source == number
            size = int(self._sizes[number])
            epoch, index = np.divmod(ordinal[selected], size)
            sample[selected] = permute(index, size, shuffle_key(self.seed, int(number), epoch))
        return [(self.streams[number], int(j)) for number, j in zip(source, sample, strict=True)]

    def _of_one_set(self, places: np.ndarray) -> list[tuple[Stream, int]]:
        ends = np.cumsum(self._sizes)
        epoch, index = np.divmod(places, ends[-1])
        sample = permute(index, int(ends[-1]), shuffle_key(self.seed, 0, epoch))
        source = np.searchsorted(ends, sample, side="right")
        first = (ends - self._sizes)[source]
        return [(self.streams[number], int(j)) for number, j in zip(source, sample - first, strict=True)]

    def _counts(self, tokens: np.ndarray, limit: int) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int64)
        stride = max(_COUNTED_AT_ONCE, len(tokens) * _COUNTED_AT_ONCE // limit)
        for start in range(0, len(tokens), stride):
            part = tokens[start : start + _COUNTED_AT_ONCE]
            self._check_vocabulary(part)
            counts += np.bincount(part, minlength=self.vocab_size)
        return counts

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            names = [stream.name for stream in self.streams]
            raise ValueError(
                f"token {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}: "
                f"the data was made with another tokenizer; read from {names}"
            )
