"""The tokenizer loses nothing and is learnt the same way each time."""

import io

import pytest
import sentencepiece

from lowprec_train.data.documents import PythonSources
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer, sample_lines
from lowprec_train.data.tokenizer import batches, check_vocabulary, load

STRANGE = [
    "",
    " ",
    "def f(x):\n    return x\n",
    "\tif x:\r\n\t\treturn\r\n",
    "\n\n  leading and trailing  \n\n",
    "née 漢字 🙂 \u2028 \ufeff \x00 \x7f ﬁ Å",
    "0123456789 " * 50,
    "x" * 10_000,
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [document.text for document in PythonSources() if document.name.startswith(("json/", "email/"))]


@pytest.fixture(scope="module")
def tokenizer(texts) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.train(texts, 600, "json and email")


def test_nothing_is_lost(tokenizer, texts):
    for text in [*STRANGE, *texts]:
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_ids_fit_the_vocabulary_and_documents_are_never_closed_inside(tokenizer, texts):
    ids = {i for encoded in tokenizer.encode(texts) for i in encoded}
    assert min(ids) >= 0 and max(ids) < tokenizer.vocab_size == 600
    assert tokenizer.eod not in ids
    assert tokenizer.eod not in tokenizer.encode(["<eod></s><s>"])[0]


def test_it_learns(tokenizer, texts):
    """600 pieces, of which 256 are bytes, still compress code by more than half."""
    characters = sum(map(len, texts))
    assert characters / sum(map(len, tokenizer.encode(texts))) > 2


def test_training_is_deterministic(tokenizer, texts):
    assert SentencePieceTokenizer.train(texts, 600, "again").content == tokenizer.content


def test_sample_takes_every_kth_line():
    texts = ["\n".join(f"{line:04d}" for line in range(start, start + 100)) + "\n\n" for start in range(0, 1000, 100)]
    assert sample_lines(texts, 10**6) == [f"{line:04d}" for line in range(1000)]
    assert sample_lines(texts, 4 * 300) == [f"{line:04d}" for line in range(0, 1000, 4)]
    assert sample_lines(["a" * 2500], 10**6) == ["a" * 1000, "a" * 1000, "a" * 500]


def test_too_little_text():
    with pytest.raises(
        ValueError, match=r"tiny: no tokenizer of 4096 pieces can be trained on it: it has text for at most \d+"
    ):
        SentencePieceTokenizer.train(["a few words, too few\n"], 4096, "tiny")


def test_load(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(ValueError, match=r"tokenizer\.model: no such tokenizer"):
        load(path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: not a SentencePiece model \(11 bytes\)"):
        load(path)
    path.write_bytes(tokenizer.content)
    assert load(path).encode(["def f"]) == tokenizer.encode(["def f"])


def test_model_without_an_end(texts):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[0].split("\n")), model_writer=model, vocab_size=100, eos_id=-1, minloglevel=2
    )
    with pytest.raises(ValueError, match=r"theirs: has no end-of-sequence piece \(eos_id -1\)"):
        SentencePieceTokenizer(model.getvalue(), "theirs")


def test_vocabulary_must_hold_the_tokenizer():
    check_vocabulary(tokenizer=4096, vocab_size=4096, name="stdlib")
    check_vocabulary(tokenizer=4096, vocab_size=32_000, name="stdlib")
    with pytest.raises(ValueError, match="vocab_size 4095 is smaller than the 4096 pieces of the tokenizer of stdlib"):
        check_vocabulary(tokenizer=4096, vocab_size=4095, name="stdlib")


def test_batches():
    texts = [*map(str, range(600))]
    found = [*batches(iter(texts))]
    assert [*map(len, found)] == [256, 256, 88] and [text for batch in found for text in batch] == texts
