"""A small text, and the set that is prepared from it without an interruption."""

import json
import random
from pathlib import Path

import pytest

from lowprec_train.data import finding
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenising import Job, prepare

CHUNK = 2000


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """600 documents in two files, some empty, and a tokenizer that was learnt from them."""
    root = tmp_path_factory.mktemp("prepare")
    draw = random.Random(0)
    words = ["".join(draw.choices("aeiounst", k=draw.randint(1, 8))) for _ in range(200)]
    texts = [" ".join(draw.choices(words, k=draw.randint(0, 60))) for _ in range(600)]
    (root / "text").mkdir()
    for name, part in (("a.jsonl", texts[:250]), ("b.jsonl", texts[250:])):
        (root / "text" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (root / "tokenizer.model").write_bytes(SentencePieceTokenizer.train(texts, 300, "words").content)
    prepare(job(root), root / "once" / "all")
    return root


def job(root: Path, **options) -> Job:
    tokenizer = SentencePieceTokenizer((root / "tokenizer.model").read_bytes(), "words")
    return Job(
        **{"inputs": finding.find([root / "text"]), "tokenizer": tokenizer, "workers": 0, "chunk": CHUNK} | options
    )


def files(prefix: Path) -> dict[str, bytes]:
    """Contents of all that lies in the directory of a dataset."""
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir()}


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "made" / "all"
