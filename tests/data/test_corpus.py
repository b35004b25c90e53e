"""Text becomes tokens once: the standard library under two processes, caches, splits, hashes, and bad text."""

import hashlib
import inspect
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_method, instantiate
from omegaconf import OmegaConf

from lowprec_train.data import prepare
from lowprec_train.data.corpus import stdlib, text
from lowprec_train.data.documents import PythonSources
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.prepare import is_held_out
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import load

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
STORY = "The quick brown fox number {0} jumps over the lazy dog of page {0}, and sleeps.\n"


@pytest.fixture
def story(tmp_path) -> str:
    """200 documents in one file."""
    lines = [json.dumps({"text": STORY.format(i) * (1 + i % 3)}) for i in range(200)]
    path = tmp_path / "story.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def cache(tmp_path) -> str:
    return str(tmp_path / "cache")


def build(train, cache: str, **options):
    return text(**{"train": train, "cache": cache, "seq_len": 16, "vocab_size": 400} | options)


def only(cache: str) -> Path:
    (directory,) = (path for path in Path(cache).iterdir() if path.is_dir())
    return directory


def test_two_processes_at_first_use(first_use):
    """One prepares, the other waits, both end with the same corpus."""
    together = "".join(first_use.outputs)
    assert together.count("prepared {") == 1
    assert len({line for line in together.splitlines() if line.startswith("hash ")}) == 1


def test_second_use_only_maps(first_use, monkeypatch):
    monkeypatch.setattr(SentencePieceTokenizer, "train", lambda *_: pytest.fail("trained again"))
    began = time.monotonic()
    corpus = stdlib(seq_len=256, cache=first_use.cache)
    assert time.monotonic() - began < 2
    assert f"hash {corpus.hash}" in first_use.outputs[0]
    assert (corpus.name, corpus.vocab_size) == ("stdlib", 4096)
    assert load(corpus.tokenizer).vocab_size == 4096


def test_stdlib_is_its_documents(first_use):
    """Decoding what is stored gives every document back, each in its split and closed by one end-of-document token."""
    directory = only(first_use.cache)
    tokenizer = load(directory / "tokenizer.model")
    for split, held_out in (("train", False), ("valid", True)):
        documents = [d for d in PythonSources() if d.text and is_held_out(d.name, 0.05) == held_out]
        stored = IndexedDataset(directory / f"{split}_text_document")
        assert len(stored) == len(documents) and stored.dtype == np.uint16
        for sequence, document in list(zip(stored, documents, strict=True))[:40]:
            ids = sequence.tolist()
            assert ids[-1] == tokenizer.eod and tokenizer.eod not in ids[:-1]
            assert tokenizer.decode(ids[:-1]) == document.text


def test_stdlib_is_worth_training_on(first_use):
    """About 12 MB in 4096 pieces: millions of tokens, 3 % to 7 % of them held out, all frequent enough to be learnt."""
    corpus = stdlib(seq_len=256, cache=first_use.cache)
    assert corpus.train.tokens > 3_000_000
    assert 0.03 < corpus.valid.tokens / corpus.train.tokens < 0.07
    assert 5.5 < corpus.valid.unigram_entropy() < 7
    batch = corpus.train.batch(0, 0, 16, 16)
    assert batch.tokens.shape == (16, 256) and torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_hash_is_of_the_tokens(first_use):
    directory = only(first_use.cache)
    tokens = b"".join((directory / f"{split}_text_document.bin").read_bytes() for split in ("train", "valid"))
    assert stdlib(seq_len=64, cache=first_use.cache).hash == hashlib.sha256(tokens).hexdigest()


def test_text_is_prepared_once_and_again_when_it_changes(story, cache, monkeypatch):
    first = build(story, cache)
    assert build(story, cache, seed=5, seq_len=32, document_mask=True).hash == first.hash
    assert len([path for path in Path(cache).iterdir() if path.is_dir()]) == 1
    trained = []
    learn = SentencePieceTokenizer.train
    monkeypatch.setattr(SentencePieceTokenizer, "train", lambda *args: trained.append(1) or learn(*args))
    variants = [build(story, cache, vocab_size=401), build(story, cache, valid_fraction=0.2)]
    with open(story, "a") as file:
        file.write('\n{"text": "one more"}')
    variants.append(build(story, cache))
    assert len(trained) == 3
    assert len({first.hash, *(variant.hash for variant in variants)}) == 4


def test_prepared_twice_is_the_same(story, cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = Path(story).rename(elsewhere / "story.jsonl")
    copied = build(str(copy), cache)
    again = build(str(copy.rename(story)), str(tmp_path / "other"))
    assert copied.hash == again.hash
    assert (only(cache) / "tokenizer.model").read_bytes() == (
        only(str(tmp_path / "other")) / "tokenizer.model"
    ).read_bytes()


def test_split_is_a_fixed_coin_for_every_name():
    """The share of names held out, 5-sigma; a larger fraction holds out more, never others."""
    names = [f"file{i}.py" for i in range(20_000)]
    held = [{name for name in names if is_held_out(name, fraction)} for fraction in (0.05, 0.2)]
    for part, fraction in zip(held, (0.05, 0.2), strict=True):
        assert abs(len(part) - fraction * 20_000) < 5 * (20_000 * fraction * (1 - fraction)) ** 0.5
    assert held[0] < held[1]


def test_adding_documents_moves_none(story, cache):
    """A document stays in its split when others come: nothing held out is ever trained on."""
    before = build(story, cache, valid_fraction=0.2)
    with open(story, "a") as file:
        file.write('\n{"text": "one more"}' * 20)
    after = build(story, cache, valid_fraction=0.2)
    assert 0 < after.valid.tokens - before.valid.tokens < after.train.tokens - before.train.tokens


def test_held_out_files_and_an_existing_tokenizer(story, cache, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(STORY.format("thousand") * 5)
    corpus = build(story, cache, valid=str(held_out))
    directory = only(cache)
    tokenizer = load(directory / "tokenizer.model")
    stored = IndexedDataset(directory / "valid_text_document")
    assert [tokenizer.decode(ids.tolist()[:-1]) for ids in stored] == [held_out.read_text()]
    assert len(IndexedDataset(directory / "train_text_document")) == 200
    model = str(directory / "tokenizer.model")
    same = build(story, str(tmp_path / "other"), valid=str(held_out), tokenizer=model, vocab_size=None)
    assert (same.hash, same.vocab_size) == (corpus.hash, 400)
    with pytest.raises(ValueError, match="vocab_size 399 is smaller than the 400 pieces of the tokenizer of .*model"):
        build(story, cache, tokenizer=model, vocab_size=399)
    with pytest.raises(ValueError, match="give the size"):
        build(story, cache, vocab_size=None)


def test_large_vocabulary_is_stored_wide(story, cache, monkeypatch):
    """65,500 pieces and more are int32; here the bound is brought down to the tokenizer's size."""
    monkeypatch.setattr(prepare, "token_dtype", lambda size: np.dtype("<u2") if size < 400 else np.dtype("<i4"))
    build(story, cache)
    assert IndexedDataset(only(cache) / "train_text_document").dtype == np.int32


@pytest.mark.parametrize("files", [{}, {"a.txt": ""}, {"a.jsonl": "\n\n"}, {"a.txt": "", "b.jsonl": '{"text": ""}\n'}])
def test_empty_corpus(tmp_path, cache, files):
    root = tmp_path / "texts"
    root.mkdir()
    for name, content in files.items():
        (root / name).write_text(content)
    with pytest.raises(ValueError, match=f"empty corpus: .*{root}"):
        build(str(root), cache)
    assert not Path(cache).exists() or not [path for path in Path(cache).iterdir() if path.is_dir()]


def test_empty_sources(tmp_path, cache):
    with pytest.raises(ValueError, match=r"empty corpus: .* holds no \.py files"):
        stdlib(seq_len=16, cache=cache, root=str(tmp_path))
    (tmp_path / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="empty corpus: no text in Python sources in"):
        stdlib(seq_len=16, cache=cache, root=str(tmp_path))


def test_empty_split(tmp_path, cache):
    (tmp_path / "only.txt").write_text(STORY.format(1) * 100)
    with pytest.raises(ValueError, match=r"the valid split is empty: valid_fraction 0\.05 of 1 documents"):
        build(str(tmp_path / "only.txt"), cache)
    with pytest.raises(ValueError, match=r"the train split is empty: valid_fraction 0\.9999999 of 1 documents"):
        build(str(tmp_path / "only.txt"), cache, valid_fraction=0.9999999)
    for fraction in (0, 1, -0.5):
        with pytest.raises(ValueError, match=f"valid_fraction {fraction} must lie between 0 and 1"):
            build(str(tmp_path / "only.txt"), cache, valid_fraction=fraction)


def test_too_little_text(story, cache):
    with pytest.raises(ValueError, match=r"story\.jsonl: no tokenizer of 30000 pieces"):
        build(story, cache, vocab_size=30_000)
    with pytest.raises(ValueError, match=r"valid_text_document: \d+ tokens, a sample of seq_len 4096 needs 4097"):
        build(story, cache, seq_len=4096)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_name_what_the_functions_take(path):
    config = OmegaConf.load(path)
    parameters = inspect.signature(get_method(config._target_)).parameters
    given = set(config) - {"_target_"}
    assert given <= set(parameters)
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert required <= given


def test_default_configuration(first_use, tmp_path, monkeypatch):
    """data=stdlib builds as it is; the cache follows XDG_CACHE_HOME."""
    config = OmegaConf.create({"seed": 3, "data": OmegaConf.load(CONFIGS / "stdlib.yaml")})
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert config.data.cache == "~/.cache/lowprec_train"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.data.cache == f"{tmp_path}/lowprec_train"
    (tmp_path / "lowprec_train").symlink_to(first_use.cache)
    corpus = instantiate(config.data)
    assert f"hash {corpus.hash}" in first_use.outputs[0]
    assert (corpus.train.seed, corpus.train.seq_len, corpus.vocab_size) == (3, 256, 4096)
    assert corpus.train.batch(0, 0, 1, 1).documents is None
