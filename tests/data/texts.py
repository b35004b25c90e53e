"""Random text of every kind that a tokenizer treats in its own way, and tokenizers learnt from it."""

import io
import random

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from lowprec_train.data.huggingface import HuggingFaceTokenizer
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer

HAN = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
EMOJI = "😀😁👍🏽👩‍👩‍👧❤️🇩🇪🎉"
SIGNS = "!?.,;:'’\"()[]{}<>|/\\-_=+*&^%$#@~`"
SPACES = [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028"]
ODD = [
    "don't",
    "I'LL",
    "<tok>",
    "ẞΣσς",
    "e\u0301a\u0308",
    "각",
    "ﬁﷺ",
    "नमस्ते",
    "مرحبا ٣٤٥٦",
    "\x1b\u200b\u00ad",
    "▁▁",
    "##x",
]
CODE = ["def f(x):\n    return x\n", "\n\n\n", "  \n  ", "http://a.b/c?d=e&f\n", "\nI'm A Title\n"]


def mixed(seed: int, length: int) -> str:
    """Words, runs of white space, Han without spaces, emoji, digits, signs, code and odd characters."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("aeiounstrlé", k=draw.randint(1, 9))) for _ in range(300)]
    kinds = [
        (45, lambda: " ".join(draw.choices(words, k=draw.randint(1, 30)))),
        (10, lambda: draw.choice(SPACES) * draw.randint(1, 12)),
        (15, lambda: "".join(draw.choices(HAN + "、。", k=draw.randint(1, 200)))),
        (8, lambda: "".join(draw.choices(EMOJI, k=draw.randint(1, 30)))),
        (6, lambda: "".join(draw.choices("0123456789", k=draw.randint(1, 30)))),
        (6, lambda: "".join(draw.choices(SIGNS, k=draw.randint(1, 10)))),
        (10, lambda: draw.choice(ODD + CODE)),
    ]
    text = ""
    while len(text) < length:
        (make,) = draw.choices([make for _, make in kinds], [weight for weight, _ in kinds])
        text += make() + draw.choice(["", "", " ", "\n"])
    return text


LEARNT_FROM = [mixed(1000 + number, 3000) for number in range(25)]


def sentencepiece_model(**settings) -> SentencePieceTokenizer:
    """A model with SentencePiece's own settings but for these."""
    lines = [line for text in LEARNT_FROM for line in text.split("\n") if line.strip()]
    model = io.BytesIO()
    given = {"vocab_size": 800, "hard_vocab_limit": False, "model_type": "bpe", "character_coverage": 0.99} | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1, **given
    )
    return SentencePieceTokenizer(model.getvalue(), "learnt")


def byte_pairs(pre_tokenizer, normalizer=None, added=(), **settings) -> HuggingFaceTokenizer:
    """A byte-pair encoding of Hugging Face's library; `settings` of the model."""
    made = tokenizers.Tokenizer(models.BPE(**settings))
    made.pre_tokenizer = pre_tokenizer
    if normalizer:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "unk_token" not in settings else []
    special = ["<|endoftext|>", *([settings["unk_token"]] if "unk_token" in settings else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=500
    )
    made.train_from_iterator(LEARNT_FROM, trainer)
    made.add_tokens([tokenizers.AddedToken(content, normalized=False) for content in added])
    return HuggingFaceTokenizer(made.to_str(), {}, "learnt", "<|endoftext|>")
