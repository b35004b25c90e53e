"""Megatron-core reads what is prepared here: sequences, documents, and the samples of its GPTDataset."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lowprec_train.data import finding
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenising import Job, prepare

TEXTS = [f"the story of number {n}\n" * (1 + n % 7) for n in range(120)]
SEQ = 32


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    for number, text in enumerate(TEXTS):
        (root / f"{number:03d}.txt").write_text(text)
    tokenizer = SentencePieceTokenizer.train(TEXTS, 300, "stories")
    prepare(Job(inputs=finding.find([root]), tokenizer=tokenizer, workers=0), root / "made" / "stories")
    return root / "made" / "stories"


def test_sequences_and_documents(prefix):
    reader = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs, ours = reader.IndexedDataset(str(prefix)), IndexedDataset(prefix)
    assert len(theirs) == len(ours) == len(TEXTS)
    np.testing.assert_array_equal(theirs.sequence_lengths, ours.lengths)
    np.testing.assert_array_equal(theirs.document_indices, ours.documents)
    tokenizer = SentencePieceTokenizer((prefix.parent / "tokenizer.model").read_bytes(), "stored")
    for number in (0, 7, len(ours) - 1):
        np.testing.assert_array_equal(theirs[number], ours[number])
        assert theirs[number][-1] == tokenizer.eod
        assert tokenizer.decode(theirs[number][:-1].tolist()) == TEXTS[number]


def test_samples(prefix, tmp_path):
    """An epoch of Megatron's training split: its documents, end to end in its order, cut every SEQ tokens."""
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    config = gpt.GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ,
        blend=([str(prefix)], None),
        split="90,8,2",
        path_to_cache=str(tmp_path),
        tokenizer=SimpleNamespace(eod=1, pad=0, vocab_size=300, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    build = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [8, 1, 1], lambda: True, config).build
    train, _, _ = build()
    ours = IndexedDataset(prefix)
    assert sorted(train.document_index) == [*range(108)]  # 90 % of 120: the documents that blend.indexed trains on
    stream = np.concatenate([ours[int(number)] for number in train.document_index])
    assert len(train) > 8
    for place in range(len(train)):
        start = int(train.shuffle_index[place]) * SEQ
        sample = train[place]
        np.testing.assert_array_equal(sample["tokens"], stream[start : start + SEQ])
        np.testing.assert_array_equal(sample["labels"], stream[start + 1 : start + SEQ + 1])
