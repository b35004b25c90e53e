"""Word by word gives the ids of the whole text, and is not used where it would not."""

import io
import random

import pytest
import sentencepiece

from lowprec_train.data import words
from lowprec_train.data.documents import PythonSources
from lowprec_train.data.sentencepiece_model import SETTINGS, SentencePieceTokenizer

ALPHABET = " \u2581\u3000\t\n\r\x00aabbée漢🙂()_0"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [document.text for document in PythonSources() if document.name.startswith(("json/", "email/"))]


def trained(texts: list[str], **settings) -> SentencePieceTokenizer:
    model = io.BytesIO()
    options = SETTINGS | {"vocab_size": 600, "minloglevel": 2} | settings
    lines = (line[:1000] for text in texts for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    return SentencePieceTokenizer(model.getvalue(), "trained")


def whole(tokenizer: SentencePieceTokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer.encode(texts, parallel=True)


def test_the_same_ids(texts):
    """Of code, and of strings that put every kind of character beside every other; the second time from memory."""
    tokenizer = trained(texts)
    draw = random.Random(0)
    drawn = ["".join(draw.choices(ALPHABET, k=draw.randint(0, 40))) for _ in range(5000)]
    assert words.separable(tokenizer.content, map(str, range(3)))
    for _ in range(2):
        for given in (texts, drawn, ["", " ", "\n", "\u2581", " \u2581 a\u2581 \u2581b\n \n", "x" * 5000]):
            assert tokenizer.encode(given, parallel=False) == whole(tokenizer, given)
    assert tokenizer._words is not None and len(tokenizer._words) > 100


def test_memory_is_bounded(texts, monkeypatch):
    monkeypatch.setattr(words, "_REMEMBERED", 50)
    tokenizer = trained(texts)
    assert tokenizer.encode(texts[:3], parallel=False) == whole(tokenizer, texts[:3])
    assert len(tokenizer._words) == 50 and max(map(len, tokenizer._words)) <= 32


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram", "vocab_size": 400, "input_sentence_size": 1000},
        {"byte_fallback": False},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"treat_whitespace_as_suffix": True},
        {"split_by_whitespace": False},
        {"user_defined_symbols": ["\n", "a b"]},
        {"user_defined_symbols": ["\n\n"]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_models_that_are_used_whole(texts, settings):
    """Also those for which it might be right: what is not proved is not done."""
    tokenizer = trained(texts, **settings)
    assert tokenizer._words is None
    assert tokenizer.encode(texts[:3], parallel=False) == whole(tokenizer, texts[:3])
