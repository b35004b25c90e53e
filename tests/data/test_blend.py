"""Megatron's datasets as a corpus: blends, splits, and the hash that names them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lowprec_train.data import blend
from lowprec_train.data.blend import indexed, parse_blend, parse_split, split_documents
from lowprec_train.data.manifest import Manifest

SEQ = 8


@pytest.fixture
def prefixes(write, tmp_path):
    """Two datasets of 100 documents of 20 tokens; token = dataset * 1000 + document."""
    for number, name in enumerate("ab"):
        write(name, [[number * 1000 + document] * 20 for document in range(100)], np.uint16)
    return str(tmp_path / "a"), str(tmp_path / "b")


def build(train, **options):
    return indexed(**{"train": train, "seq_len": SEQ, "vocab_size": 2000, "split": "90,8,2"} | options)


def seen(data, batches: int = 100) -> set[int]:
    return set(torch.cat([data.batch(step, 0, 16, 16).tokens.flatten() for step in range(batches)]).tolist())


def test_split_by_documents(prefixes):
    corpus = build(prefixes[0])
    assert (corpus.train.tokens, corpus.valid.tokens) == (90 * 20, 8 * 20)
    assert seen(corpus.train) == set(range(90))
    assert seen(corpus.valid) == set(range(90, 98))


def test_split_rounds_like_megatron():
    """Megatron: round(begin * n), round(end * n) of the normalised cumulative shares."""
    shares = parse_split("949,50,1")
    assert [split_documents(10_001, shares, part) for part in range(3)] == [
        range(9491),
        range(9491, 9991),
        range(9991, 10_001),
    ]


@pytest.mark.parametrize("split", ["949,50,1", [949, 50, 1], (0.949, 0.05, 0.001)])
def test_ways_to_write_a_split(split):
    assert parse_split(split) == pytest.approx((0.949, 0.05, 0.001))
    assert parse_split("9,1") == pytest.approx((0.9, 0.1, 0.0))


def test_training_text_as_validation_is_warned_of(prefixes, caplog):
    held_out = [os.path.join(os.path.dirname(prefixes[1]), ".", os.path.basename(prefixes[1]))]
    build(prefixes, valid=held_out, split=None)
    assert caplog.messages == [
        f"warning: data.valid={held_out[0]} is in data.train too: valid/loss is of training text"
    ]
    caplog.clear()
    build(prefixes[:1], valid=prefixes[1:], split=None)
    assert not caplog.messages


def test_blend_of_both(prefixes):
    corpus = build([0.7, prefixes[0], 0.3, prefixes[1]])
    tokens = torch.cat([corpus.train.batch(step, 0, 10, 10).tokens for step in range(50)])
    assert (tokens[:, 0] >= 1000).sum() == 150
    assert seen(corpus.train) == set(range(90)) | set(range(1000, 1090))
    assert seen(corpus.valid) == set(range(90, 98)) | set(range(1090, 1098))


def test_several_without_weights_are_one_set(prefixes, write, tmp_path):
    """Every sample of all files once an epoch, in an order that mixes them; a directory stands for its files."""
    (tmp_path / "more").mkdir()
    write("more/c", [[2500] * 5] * 40, np.uint16)
    corpus = build([*prefixes, str(tmp_path / "more")], vocab_size=3000)
    sizes = [(90 * 20 - 1) // SEQ, (90 * 20 - 1) // SEQ, (36 * 5 - 1) // SEQ]
    rows = torch.cat([corpus.train.batch(step, 0, 8, 8).tokens for step in range(-(-2 * sum(sizes) // 8))])
    for epoch in (rows[: sum(sizes)], rows[sum(sizes) : 2 * sum(sizes)]):
        of = epoch[:, 0] // 1000
        assert [(of == number).sum() for number in range(3)] == [224, 224, 22]
        assert (of[1:] != of[:-1]).sum() > 150
    assert corpus.hash != build([*prefixes], vocab_size=3000).hash
    assert build(str(tmp_path / "more"), vocab_size=3000).train.tokens == 36 * 5
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none: a directory without a dataset"):
        build(str(tmp_path / "none"))


def manifest(prefix: str, **tokenizer) -> None:
    """Beside a dataset, the manifest that says who made it."""
    told = {"file": "tokenizer.model", "sha256": "a", "vocab_size": 1500, "eod": 1} | tokenizer
    numbers = {"documents": 100, "tokens": 2000, "text_bytes": 9, "empty": 0, "bad": 0}
    files = {end: {"bytes": Path(f"{prefix}.{end}").stat().st_size, "sha256": "a"} for end in ("bin", "idx")}
    about = {"dtype": "uint16", "field": "text", "inputs": [], "files": files, "versions": {}}
    Manifest(**numbers, **about, tokenizer=told).write(Path(prefix))


def test_the_manifest_says_the_vocabulary(prefixes, tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocab_size must be given: \['.*/a'\] have no \.manifest\.json"):
        build(prefixes[0], vocab_size=None)
    assert build(prefixes[0]).tokenizer is None
    manifest(prefixes[0])
    corpus = build(prefixes[0], vocab_size=None)
    assert (corpus.vocab_size, corpus.train.vocab_size) == (1500, 1500)
    assert corpus.tokenizer == tmp_path / "tokenizer.model"
    assert build(prefixes[0]).vocab_size == 2000
    with pytest.raises(ValueError, match=r"vocab_size 1400 is smaller than the 1500 pieces of the tokenizer of .*/a"):
        build(prefixes[0], vocab_size=1400)
    both = [0.5, prefixes[0], 0.5, prefixes[1]]
    with pytest.raises(ValueError, match=r"\['.*/b'\] have no \.manifest\.json"):
        build(both, vocab_size=None)
    manifest(prefixes[1], sha256="b")
    with pytest.raises(ValueError, match=r"datasets of different tokenizers cannot be read together: .*/a.*/b"):
        build(both)
    manifest(prefixes[1])
    assert build(both, vocab_size=None).vocab_size == 1500
    whole = json.loads(Path(f"{prefixes[1]}.manifest.json").read_text())
    for damaged in (
        {"documents": 1},
        whole | {"files": {}},
        whole | {"files": []},
        whole | {"tokens": "abc"},
        whole | {"inputs": [{}]},
        whole | {"tokenizer": whole["tokenizer"] | {"vocab_size": None}},
    ):
        Path(f"{prefixes[1]}.manifest.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"b\.manifest\.json: not a manifest of `lowprec prepare-data`"):
            build(both, vocab_size=None)


def test_explicit_validation(prefixes):
    corpus = build(prefixes[0], valid=[prefixes[1]], split=None)
    assert seen(corpus.train) == set(range(100))
    assert seen(corpus.valid) == set(range(1000, 1100))


def test_validation_does_not_depend_on_the_seed(prefixes):
    first, second = (build(prefixes[0], seed=seed) for seed in (1, 2))
    assert torch.equal(first.valid.batch(0, 0, 8, 8).tokens, second.valid.batch(0, 0, 8, 8).tokens)
    assert not torch.equal(first.train.batch(0, 0, 8, 8).tokens, second.train.batch(0, 0, 8, 8).tokens)
    assert first.hash == second.hash


def test_hash_names_content_and_shares_but_not_places(prefixes, tmp_path):
    base = build([0.7, prefixes[0], 0.3, prefixes[1]])
    for extension in ("bin", "idx"):
        shutil.copy(f"{prefixes[0]}.{extension}", tmp_path / f"moved.{extension}")
    moved = build([7, str(tmp_path / "moved"), 3, prefixes[1]])
    assert moved.hash == base.hash
    others = [
        build([0.6, prefixes[0], 0.4, prefixes[1]]),
        build([0.7, prefixes[1], 0.3, prefixes[0]]),
        build([0.7, prefixes[0], 0.3, prefixes[1]], split="80,18,2"),
        build(prefixes[0]),
    ]
    content = bytearray((tmp_path / "moved.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "moved.bin").write_bytes(content)
    others.append(build([7, str(tmp_path / "moved"), 3, prefixes[1]]))
    assert len({base.hash, *(other.hash for other in others)}) == 6


def test_large_files_are_hashed_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(blend, "_READ_WHOLE", 40)
    monkeypatch.setattr(blend, "_BLOCK", 10)
    content = bytearray(range(100))
    path = tmp_path / "large"

    def digest() -> bytes:
        path.write_bytes(content)
        return blend._file_digest(path)

    digests = [digest()]
    for at in (0, 30, 60, 99, 15):  # first, second, third and last block; the last place is in none
        content[at] ^= 1
        digests.append(digest())
    assert len(set(digests[:5])) == 5 and digests[5] == digests[4]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([0.5, "a", 0.5], r"expected a prefix, several, or weight, prefix"),
        ([], r"blend=\[\]: expected a prefix"),
        (["a", "b", 2, "c"], r"expected a weight and a prefix, got 'a', 'b'"),
        (["a", "b", "a"], r"names a dataset twice"),
        (["a", "./a"], r"names a dataset twice"),
        ([0.5, 0.5], r"expected a weight and a prefix, got 0\.5, 0\.5"),
        ([None, "a"], r"expected a weight and a prefix, got 1\.0, None"),
        ([1, "a", 2, "a"], r"names a dataset twice"),
        ([1, "a", -2, "b"], r"blend weight -2\.0"),
    ],
)
def test_blends_that_cannot_be_read(train, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(train)


@pytest.mark.parametrize(
    "split", ["949", "949,0,51", "0,1", "1,2,3,4", "a,b", [1, -1, 1], "nan,1,1", "1,inf", [None, 1]]
)
def test_splits_that_cannot_be_read(split):
    with pytest.raises(ValueError, match=r"split .*949,50,1"):
        parse_split(split)


def test_bad_corpora(prefixes, tmp_path):
    with pytest.raises(ValueError, match=r"exactly one of valid and split"):
        build(prefixes[0], valid=prefixes[1])
    with pytest.raises(ValueError, match=r"exactly one of valid and split"):
        build(prefixes[0], split=None)
    with pytest.raises(ValueError, match=r"absent\.idx: no such file"):
        build(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"a: the valid part is empty: 100 documents"):
        build(prefixes[0], split=[1, 0.001])
    with pytest.raises(ValueError, match=r"a: 160 tokens, a sample of seq_len 256 needs 257"):
        build(prefixes[0], seq_len=256)
