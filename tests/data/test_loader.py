"""Batches are a pure function of (seed, step), each sample comes once an epoch, and documents keep their bounds."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.loader import Dataset, Stream
from lowprec_train.data.order import Blend
from tests.data.indexed_files import write_indexed

EOD = 99
SEQ = 8


def whole(source: IndexedDataset) -> Stream:
    return Stream(source, range(source.document_count))


def dataset(*sources: IndexedDataset, seed: int = 7, **options) -> Dataset:
    given = {"seq_len": SEQ, "vocab_size": 10_000, "seed": seed} | options
    return Dataset(streams=tuple(whole(source) for source in sources), **given)


def lengths(count: int) -> list[int]:
    return [1 + (7 * i) % 23 for i in range(count)]


@pytest.fixture
def counting(write):
    """Documents whose tokens count up through the whole corpus: a token is its own position."""
    bounds = np.cumsum([0, *lengths(60)])
    return write("counting", [range(a, b) for a, b in pairwise(bounds)])


def test_samples_are_windows_that_share_one_token(counting):
    data = dataset(counting)
    samples = (data.tokens - 1) // SEQ
    batch = data.batch(0, 0, samples, samples)
    starts = batch.tokens[:, 0]
    assert torch.equal(batch.tokens, starts[:, None] + torch.arange(SEQ))
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert sorted(starts.tolist()) == [j * SEQ for j in range(samples)]
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous() and batch.documents is None


def test_each_sample_once_an_epoch_in_an_order_of_its_own(counting):
    data = dataset(counting)
    samples = (data.tokens - 1) // SEQ
    per_step = 7
    steps = -(-4 * samples // per_step)
    starts = torch.cat([data.batch(step, 0, per_step, per_step).tokens[:, 0] for step in range(steps)])
    epochs = starts[: 4 * samples].reshape(4, samples)
    assert torch.equal(epochs.sort().values, (torch.arange(samples) * SEQ).expand(4, -1))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 3, 6])
def test_any_layout_reads_the_same(counting, write, ranks, micro_batch):
    """Ranks and micro-batches cut a step into pieces; put together they are the step."""
    sources = counting, write("other", [[5000 + i for i in range(500)]])
    data = dataset(*sources, order=Blend([0.7, 0.3]), document_mask=True)
    per_step = ranks * micro_batch * 2
    for step in (0, 3, 10**6):
        batch = data.batch(step, 0, per_step, per_step)
        pieces = [
            dataset(*sources, order=Blend([0.7, 0.3]), document_mask=True).batch(step, first, micro_batch, per_step)
            for first in range(0, per_step, micro_batch)
        ]
        for field in ("tokens", "targets", "documents"):
            assert torch.equal(torch.cat([getattr(piece, field) for piece in pieces]), getattr(batch, field))


def test_a_resumed_run_reads_on(counting):
    """The same data-parallel size or another, from any step: only tokens already read decide what comes next."""
    straight = torch.cat([dataset(counting).batch(step, 0, 4, 4).tokens for step in range(20)])
    first = [dataset(counting).batch(step, 0, 4, 4).tokens for step in range(10)]
    resumed = [dataset(counting).batch(step, rank * 2, 2, 4).tokens for step in range(10, 20) for rank in range(2)]
    assert torch.equal(torch.cat(first + resumed), straight)


def test_seeds_differ(counting):
    first, second = (dataset(counting, seed=seed).batch(0, 0, 8, 8).tokens for seed in (1, 2))
    assert not torch.equal(first, second)


def test_blend_keeps_proportions_and_epochs(counting, write):
    """0.75 of one, 0.25 of the other; the small one is read again and again, every epoch whole."""
    small = write("small", [range(5000, 5000 + 10 * SEQ + 1)])
    data = dataset(counting, small, order=Blend([3, 1]))
    starts = torch.cat([data.batch(step, 0, 16, 16).tokens[:, 0] for step in range(10)])
    from_small = starts[starts >= 5000]
    assert len(from_small) == 40
    expected = 5000 + torch.arange(10) * SEQ
    assert torch.equal(from_small.reshape(4, 10).sort().values, expected.expand(4, -1))


def brute_force_ids(documents: list[list[int]], start: int) -> list[int]:
    owner = [number for number, document in enumerate(documents) for _ in document]
    return [number - owner[start] for number in owner[start : start + SEQ]]


def densified(ids: list[int]) -> list[int]:
    """Ids without the numbers of documents that hold no token."""
    return [sorted(set(ids)).index(i) for i in ids]


def test_document_ids(write):
    """Against the owner of every token, for documents of all lengths."""
    documents = [[*range(length), EOD] for length in lengths(50)]
    stream = whole(write("a", documents))
    for start in range(len(stream) - SEQ):
        assert stream.document_ids(start, SEQ).tolist() == brute_force_ids(documents, start)


def test_document_ids_in_batches(write):
    documents = [[*range(1, 1 + number % 6), EOD] for number in range(60)]
    batch = dataset(write("a", documents), document_mask=True).batch(0, 0, 20, 20)
    closed = (batch.tokens == EOD).long()
    assert torch.equal(batch.documents, closed.cumsum(1) - closed)  # the closing token belongs to what it closes
    assert batch.documents.dtype == torch.int64 and batch.documents.max() > 1


def test_document_ids_of_many_and_no_sequences(tmp_path):
    """A document may be several sequences, or none; the stream may begin inside the file."""
    documents = [[[1, 2], [3]], [], [[4], [], [5, 6, 7]], [[8]], [[9] * 5, [10] * 6], [], [[11] * 9], []]
    bounds = np.cumsum([0, *map(len, documents)])
    write_indexed(tmp_path / "a", [sequence for document in documents for sequence in document], np.uint16, bounds)
    source = IndexedDataset(tmp_path / "a")
    for first in range(len(documents) - 2):
        flat = [[token for sequence in document for token in sequence] for document in documents[first:]]
        stream = Stream(source, range(first, len(documents)))
        assert stream.tokens.tolist() == [token for document in flat for token in document]
        for start in range(len(stream) - SEQ + 1):
            ids = stream.document_ids(start, SEQ).tolist()
            assert densified(ids) == densified(brute_force_ids(flat, start)), (first, start)


def test_stream_is_a_view(counting):
    stream = Stream(counting, range(10, 20))
    assert np.shares_memory(stream.tokens, counting.data)
    assert stream.tokens[0] == sum(lengths(60)[:10]) and len(stream) == sum(lengths(60)[10:20])


def test_unigram_entropy(write):
    first, second = [1, 1, 1, 2, 3, 3, 4, 5, 9, 9], [7, 7, 7, 1, 1, 2, 6, 6, 6]

    def entropy(frequency: Counter) -> float:
        return -sum(p * math.log(p) for p in frequency.values())

    def frequency(tokens: list[int], share: float) -> Counter:
        return Counter({token: share * count / len(tokens) for token, count in Counter(tokens).items()})

    one, two = write("one", [first]), write("two", [second])
    assert dataset(one).unigram_entropy() == pytest.approx(entropy(frequency(first, 1.0)))
    blended = dataset(one, two, order=Blend([0.8, 0.2])).unigram_entropy()
    assert blended == pytest.approx(entropy(frequency(first, 0.8) + frequency(second, 0.2)))


def test_unigram_entropy_of_a_sample(write, monkeypatch):
    """A stream above the limit is counted in pieces spread over it: here halves with different tokens."""
    monkeypatch.setattr("lowprec_train.data.loader._COUNTED_AT_ONCE", 10)
    data = dataset(write("a", [[1] * 500, [2] * 500]))
    assert data.unigram_entropy(limit=100) == pytest.approx(math.log(2))


def test_too_short(write):
    source = write("short", [range(SEQ)])
    with pytest.raises(ValueError, match=r"short: 8 tokens, a sample of seq_len 8 needs 9"):
        dataset(source)
    assert dataset(write("enough", [range(SEQ + 1)])).batch(5, 0, 1, 1).tokens[0].tolist() == list(range(SEQ))


def test_token_outside_the_vocabulary(write):
    data = dataset(write("a", [[1] * 20 + [4096]]), vocab_size=4096)
    with pytest.raises(ValueError, match=r"token 4096 is outside the vocabulary of 4096.*a'\]"):
        data.unigram_entropy()
    negative = dataset(write("b", [[1] * 8 + [-1] * 8]))
    with pytest.raises(ValueError, match="token -1 is outside the vocabulary of 10000"):
        negative.batch(0, 0, 1, 1)


@pytest.mark.parametrize(
    ("step", "first", "count", "per_step"), [(0, 3, 2, 4), (-1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 0, 1)]
)
def test_range_outside_the_step(counting, step, first, count, per_step):
    with pytest.raises(ValueError, match=rf"sequences {first}\.\.{first + count} of step {step}, which has {per_step}"):
        dataset(counting).batch(step, first, count, per_step)


def test_seq_len_must_be_positive(counting):
    with pytest.raises(ValueError, match="seq_len 0 must be positive"):
        dataset(counting, seq_len=0)


def test_streams_need_integers_end_to_end(write, tmp_path):
    floats = write("floats", [[1.0] * 20], np.float32)
    with pytest.raises(ValueError, match="floats: holds float32, not token ids"):
        whole(floats)
    write("apart", [[1, 2], [3, 4]])
    index = bytearray((tmp_path / "apart.idx").read_bytes())
    index[34 + 8 + 8] = 4  # the second sequence begins inside the first
    (tmp_path / "apart.idx").write_bytes(bytes(index))
    with pytest.raises(ValueError, match="sequence 0 ends at byte 8, the next begins at 4"):
        whole(IndexedDataset(tmp_path / "apart"))


@pytest.mark.parametrize("shares", [None, [0.5, 0.5], [0.3, 0.7], [0.9, 0.1], [1, 2]])
def test_from_where_on_sequences_repeat(shares, write):
    """Counted in what is read."""
    sources = write("ten", [range(10 * SEQ + 1)]), write("many", [range(1000, 1000 + 25 * SEQ + 1)])
    data = dataset(*sources, order=shares and Blend(shares))
    starts = data.batch(0, 0, 60, 60).tokens[:, 0].tolist()
    distinct = next(i for i, start in enumerate(starts) if start in starts[:i])
    assert not data.repeats(distinct) and data.repeats(distinct + 1)
