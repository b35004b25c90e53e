"""SentencePiece models of every kind: tokens of the pieces are those of the whole."""

from itertools import pairwise

import pytest
import sentencepiece

from lowprec_train.data import cuts
from lowprec_train.data.sentencepiece_cuts import CutRule, _fields
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from tests.data import texts
from tests.data.test_cuts import check_exact, in_pieces, small_pieces  # noqa: F401 (a fixture)

AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
PLAIN = ("han", "words", "two spaces", "lines", "digits", "emoji")


def test_what_train_tokenizer_learns():
    learnt = SentencePieceTokenizer.train(texts.LEARNT_FROM, 800, "texts")
    check_exact(learnt, sure_of=(*PLAIN, "white space", "signs", "jamo", "marks"))


@pytest.mark.parametrize(
    ("settings", "sure_of"),
    [
        ({**AS_IT_IS, "byte_fallback": True, "split_digits": True}, PLAIN),  # LLaMA 2
        (
            {
                **AS_IT_IS,
                "byte_fallback": True,
                "add_dummy_prefix": False,
                "user_defined_symbols": ["\n", "\n\n", "▁▁"],
            },
            ("words", "two spaces", "lines"),
        ),  # Gemma
        ({**AS_IT_IS, "byte_fallback": True, "split_by_whitespace": False}, ("han",)),
        ({**AS_IT_IS, "add_dummy_prefix": False}, ("words", "lines")),  # unknown characters run together
        ({"normalization_rule_name": "identity"}, ("words",)),
    ],
)
def test_byte_pairs(settings, sure_of):
    check_exact(texts.sentencepiece_model(**settings), sure_of=sure_of)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_text_that_is_normalised_is_cut_before_spaces(kind):
    """The default of SentencePiece composes characters and drops runs of spaces: mixed text may need other cuts."""
    tokenizer = texts.sentencepiece_model(model_type=kind)
    for seed in range(10):
        text = texts.mixed(seed, 4000)
        ids, found = in_pieces(text, tokenizer)
        if not any(piece.inexact for piece in found):
            assert ids == tokenizer.encode([text])[0]
        assert all(piece.text.startswith(" ") for before, piece in pairwise(found) if not before.inexact)


def test_unigram_scores_are_no_lower_than_of_the_whole():
    """Sums of scores in single precision lose more in a long text; a tie may fall the other way in a short one."""
    tokenizer = texts.sentencepiece_model(model_type="unigram", **AS_IT_IS, byte_fallback=True)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    for seed in range(10):
        text = texts.mixed(seed, 4000)
        ids, _ = in_pieces(text, tokenizer)
        pieces, whole = (sum(map(processor.get_score, each)) for each in (ids, tokenizer.encode([text])[0]))
        assert pieces >= whole - 1e-3


@pytest.mark.parametrize("symbol", ["   ", "▁▁", " x", "a b"])
def test_symbols_that_keep_spaces_have_no_place_where_spaces_are_dropped(symbol):
    dropping = texts.sentencepiece_model(normalization_rule_name="identity", user_defined_symbols=[symbol])
    assert dropping.cut("lorem   ipsum " * 100) is None
    other = texts.sentencepiece_model(normalization_rule_name="identity", user_defined_symbols=["<x>"])
    assert other.cut("lorem   ipsum " * 100)


def test_a_model_of_words_has_no_place():
    tokenizer = texts.sentencepiece_model(model_type="word")
    assert tokenizer.cut(texts.mixed(0, 300)) is None
    assert CutRule.of(tokenizer.content, None) is None


def test_fields_of_a_message():
    """Numbers of one and two bytes, bytes, and values of fixed size (developers.google.com/protocol-buffers)."""
    message = b"\x08\x96\x01" + b"\x12\x02hi" + b"\x1d\x00\x00\x80\x3f" + b"\x21" + bytes(8) + b"\x28\x01"
    assert [*_fields(message)] == [(1, 150), (2, b"hi"), (3, b"\x00\x00\x80\x3f"), (4, bytes(8)), (5, 1)]
    assert cuts.neighbours(["abc", "x", "bc"]) == {"ab", "bc"}
