"""tokenizer.json files: the ids of the library, an end for documents, and stored so that the end is found again."""

import json
import os
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lowprec_train import __version__
from lowprec_train.data import finding
from lowprec_train.data.documents import TextFiles
from lowprec_train.data.huggingface import HuggingFaceTokenizer
from lowprec_train.data.prepare import Preparation
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenising import Job, prepare
from lowprec_train.data.tokenizer import load, store

TEXTS = ["def f(x):\n    return x\n", "", "née 漢字 🙂\n\n two <|endoftext|> three", " x" * 300]


def byte_level(path: Path, special: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 pieces as GPT-2's, which asks for truncation and padding too."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.enable_truncation(16)
    made.enable_padding(length=16)
    made.save(str(path))
    return made


@pytest.fixture
def path(tmp_path) -> Path:
    byte_level(tmp_path / "tokenizer.json", ["<pad>", "<|endoftext|>"])
    return tmp_path / "tokenizer.json"


def test_ids_are_those_of_the_library(path):
    ours, theirs = load(path), tokenizers.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    theirs.no_padding()
    plain = [text.replace("<|endoftext|>", "") for text in TEXTS]
    assert ours.encode(plain) == [each.ids for each in theirs.encode_batch(plain, add_special_tokens=False)]
    assert ours.encode(TEXTS) == ours.encode(TEXTS, parallel=False)
    assert (ours.vocab_size, ours.eod) == (theirs.get_vocab_size(), theirs.token_to_id("<|endoftext|>"))
    assert max(map(len, ours.encode(TEXTS))) > 16


def test_nothing_is_lost_and_text_closes_no_document(path):
    tokenizer = load(path)
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert tokenizer.eod not in {i for ids in encoded for i in ids}
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_the_end_of_documents(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level(path, ["<a>", "<b>"])
    with pytest.raises(ValueError, match=r"which token ends a document; .*--eod.* \['<a>', '<b>'\]"):
        load(path)
    with pytest.raises(ValueError, match=r"has no token '<c>'"):
        load(path, "<c>")
    assert load(path, "<b>").eod == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<b>"}, "model_max_length": 7}')
    assert load(path).eod == 1 and load(path, "<a>").eod == 0
    assert load(path).digest != load(path, "<a>").digest
    byte_level(path, ["</s>", "<|endoftext|>"])
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="which token ends"):
        load(path)


def test_stored_with_its_end(path, tmp_path):
    (path.parent / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    chosen = load(path, "<pad>")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stored = store(chosen, elsewhere)
    again = load(elsewhere)
    assert (stored, again.eod, again.digest) == (elsewhere / "tokenizer.json", 0, chosen.digest)
    assert json.loads((elsewhere / "tokenizer_config.json").read_text()) == {
        "model_max_length": 7,
        "eos_token": "<pad>",
    }
    assert stored.read_bytes() == path.read_bytes()
    assert store(again, elsewhere) == stored
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: another tokenizer is there"):
        store(load(path), elsewhere)
    learnt = SentencePieceTokenizer.train([text * 50 for text in TEXTS], 300, "texts")
    with pytest.raises(ValueError, match=r"tokenizer\.json: another tokenizer is there"):
        store(learnt, elsewhere)
    assert sorted(each.name for each in elsewhere.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_kinds_are_separated_by_content(path):
    assert isinstance(load(path), HuggingFaceTokenizer)
    learnt = SentencePieceTokenizer.train([text * 50 for text in TEXTS], 300, "texts")
    misnamed = path.with_name("model.json")
    misnamed.write_bytes(learnt.content)
    assert load(misnamed).digest == learnt.digest
    assert load(misnamed, "<eod>").eod == learnt.eod
    with pytest.raises(ValueError, match=r"its end-of-sequence piece is not '</s>'"):
        load(misnamed, "</s>")


def test_files_that_cannot_be_read(tmp_path, path, monkeypatch):
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ValueError, match=r"empty\.json: not a tokenizer\.json that can be read: "):
        load(tmp_path / "empty.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package 'tokenizers': pip install 'lowprec_train\[data\]'"):
        load(path)


def test_the_library_that_decided_the_ids_is_named(path, tmp_path, monkeypatch):
    """In the manifest, and in the name of a cached corpus; a SentencePiece corpus keeps its own."""
    tokenizer, ours = load(path), {"tokenizers": tokenizers.__version__}
    (tmp_path / "text.txt").write_text("def f(x): return x")
    job = Job(inputs=finding.find([tmp_path / "text.txt"]), tokenizer=tokenizer, workers=0)
    assert prepare(job, tmp_path / "made" / "all").versions == {"lowprec_train": __version__, **ours}
    text = TextFiles(str(tmp_path / "text.txt"))
    existing, learnt = Preparation(train=text, tokenizer=tokenizer), Preparation(train=text, vocab_size=300)
    before = existing.digest(), learnt.digest()
    monkeypatch.setattr(tokenizers, "__version__", "another")
    assert existing.digest() != before[0] and learnt.digest() == before[1]


def test_stored_files_are_on_disk(path, tmp_path, monkeypatch):
    """Each is synced before it gets its name, and no other file stays."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "stored").mkdir()
    store(load(path), tmp_path / "stored")
    names = sorted(each.name for each in (tmp_path / "stored").iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"] and len(synced) == 2
