"""Tokenizers of Hugging Face's library, from parts of published ones: tokens of the pieces are those of the whole."""

import json

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from lowprec_train.data.huggingface import HuggingFaceTokenizer
from tests.data import texts
from tests.data.test_cuts import check_exact, in_pieces, small_pieces  # noqa: F401 (a fixture)

GPT4 = (  # of cl100k_base and LLaMA 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", GPT4)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SURE = ("words", "two spaces", "lines", "marks")


def split(*patterns: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), BYTES])


@pytest.mark.parametrize(
    ("make", "sure_of"),
    [
        (lambda: texts.byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)), (*SURE, "emoji")),  # GPT-2
        (lambda: texts.byte_pairs(split(GPT4), ignore_merges=True), SURE),  # LLaMA 3
        (lambda: texts.byte_pairs(split(GPT4), added=["<tok>"]), (*SURE, "emoji")),
        (lambda: texts.byte_pairs(split(GPT4.replace("{1,3}", "")), normalizers.NFC(), ["<tok>"]), SURE),  # Qwen
        (lambda: texts.byte_pairs(split(*DEEPSEEK)), SURE),
        (lambda: texts.byte_pairs(BYTES), ("words", "lines")),
        (lambda: llama_2(), ("words", "two spaces", "lines", "han")),
    ],
    ids=["gpt2", "llama3", "gpt4", "qwen", "deepseek", "bytes", "llama2"],
)
def test_byte_pairs(make, sure_of):
    check_exact(make(), sure_of=sure_of)


def llama_2() -> HuggingFaceTokenizer:
    """Merges over the whole text, in which spaces are spelled; unknown characters are bytes."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=names, show_progress=False, limit_alphabet=300)
    made.train_from_iterator(texts.LEARNT_FROM, trainer)
    parts = json.loads(made.to_str()) | {"pre_tokenizer": None}
    parts["added_tokens"] = parts["added_tokens"][:2]
    return HuggingFaceTokenizer(json.dumps(parts), {}, "llama2", "<|endoftext|>")


def check_where_spaces_are(tokenizer: HuggingFaceTokenizer) -> None:
    """Tokens of the whole wherever no cut says otherwise, and no such cut where there are words."""
    for text in (*(texts.mixed(seed, 4000) for seed in range(6)), "lorem ipsum, " * 300):
        ids, found = in_pieces(text, tokenizer)
        inexact = any(piece.inexact for piece in found)
        assert inexact or ids == tokenizer.encode([text])[0]
        assert not (inexact and text.startswith("lorem"))


def test_words_of_other_models():
    made = tokenizers.Tokenizer(models.Unigram())  # T5
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(texts.LEARNT_FROM, trainer)
    check_where_spaces_are(HuggingFaceTokenizer(made.to_str(), {}, "t5", "</s>"))
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", "[EOS]"], show_progress=False)
    made.train_from_iterator(texts.LEARNT_FROM, trainer)
    check_where_spaces_are(HuggingFaceTokenizer(made.to_str(), {}, "bert", "[EOS]"))
    check_where_spaces_are(texts.byte_pairs(pre_tokenizers.Metaspace(), unk_token="<unk>"))
    check_where_spaces_are(texts.byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=True)))


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "UnicodeScripts"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(?<=a) "}, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": r"\s+$"}, "content": ""}},
    ],
)
def test_parts_that_look_further_have_no_place(changes):
    made = texts.byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False))
    parts = json.loads(made.files["tokenizer.json"]) | changes
    other = HuggingFaceTokenizer(json.dumps(parts), {}, "other", "<|endoftext|>")
    assert other.cut("lorem ipsum " * 100) is None and made.cut("lorem ipsum " * 100)


@pytest.mark.parametrize(
    "pattern", [r".{1,5}", "..", r"\S{4}|\s", r"\S\S|\s", r"\w{1,3}|\W", r"[^ ]{2,3}| +", r"\p{L}{1,4}|\P{L}"]
)
def test_patterns_that_count_characters_have_no_place(pattern):
    """Their groups begin where the text does: after a cut they would begin anew. Digits end before any cut."""
    counting = texts.byte_pairs(split(pattern))
    assert counting.cut("lorem ipsum " * 100) is None
    plain = texts.byte_pairs(split(r"\d{1,3}|[0-9]{2}|\p{Nd}{4}|\x{3042}+|\s{2,}|" + GPT4))
    assert plain.cut("lorem 12345 ipsum " * 100)
