"""Lossless SentencePiece byte-pair encoding: identity normalisation, byte fallback, newlines kept. Except for
U+2581, SentencePiece's own mark of a space, which is decoded as a space.

Training is single-threaded and reads its lines in a fixed order, so the same text gives the same model, byte for byte.
Lines are a sample of the text: every k-th, and k doubles whenever the sample exceeds its limit.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import sentencepiece

from lowprec_train.data.cuts import last_cut
from lowprec_train.data.endings import NoEnding
from lowprec_train.data.sentencepiece_cuts import CutRule

SAMPLE_CHARACTERS = 16_000_000  # training takes about 0.2 s per million
_LONGEST_LINE = 1000  # characters; longer lines are split for training (SentencePiece drops lines above 4192 bytes)

_LEAST = 259  # 256 bytes, the newline, the unknown piece and the end of a document

SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.9999,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": ["\n"],
    "unk_id": 0,
    "eos_id": 1,
    "eos_piece": "<eod>",
    "bos_id": -1,
    "pad_id": -1,
    "num_threads": 1,
}


class SentencePieceTokenizer:
    """A SentencePiece `Tokenizer`. Its end-of-sequence piece ends documents; `eod`, if given, must be that piece.

    Raises:
        ValueError: the bytes are not a SentencePiece model, or it has no end-of-sequence piece, or another.
    """

    file_name = "tokenizer.model"
    versions: Mapping[str, str] = {"sentencepiece": sentencepiece.__version__}

    def __init__(self, content: bytes, name: str, eod: str | None = None) -> None:
        self.content = content
        if not content:
            raise ValueError(f"{name}: not a SentencePiece model: the file is empty")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"{name}: not a SentencePiece model ({len(content)} bytes)") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if eod is not None and (self.eod < 0 or self._processor.id_to_piece(self.eod) != eod):
            raise NoEnding(f"{name}: its end-of-sequence piece is not {eod!r}; a SentencePiece model has no other")
        if self.eod < 0:
            raise NoEnding(f"{name}: has no end-of-sequence piece (eos_id {self.eod}) to end documents with")

    @cached_property
    def _cut_rule(self) -> CutRule | None:
        return CutRule.of(self.content, self._processor)

    @cached_property
    def _continuing(self) -> sentencepiece.SentencePieceProcessor:
        """The model for text after a cut: without the space that it may put before a text."""
        rule = self._cut_rule
        return self._processor if rule is None else sentencepiece.SentencePieceProcessor(model_proto=rule.continuing)

    @property
    def files(self) -> dict[str, bytes]:
        return {self.file_name: self.content}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, name: str, sample: int = SAMPLE_CHARACTERS
    ) -> SentencePieceTokenizer:
        """Train `vocab_size` pieces on `sample` characters of the texts. `name`: of the texts, for errors.

        Raises:
            ValueError: the text is too small or too varied for this vocabulary.
        """
        if sample < 1:
            raise ValueError(f"sample={sample} must be at least 1 character")
        if vocab_size < _LEAST:
            raise ValueError(
                f"vocab_size {vocab_size} is too small for a tokenizer: {_LEAST} pieces are bytes and special tokens"
            )
        lines = sample_lines(texts, sample)
        if not any(line.strip() for line in lines):
            raise ValueError(f"{name}: no text to train a tokenizer on, or nothing but white space")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                vocab_size=vocab_size,
                max_sentence_length=4 * _LONGEST_LINE,
                minloglevel=2,
                **SETTINGS,
            )
        except RuntimeError as error:
            raise ValueError(
                f"{name}: no tokenizer of {vocab_size} pieces can be trained on it{_why(error)}"
            ) from error
        return cls(model.getvalue(), name)

    def encode(self, texts: list[str], *, parallel: bool = True, continued: bool = False) -> list[list[int]]:
        processor = self._continuing if continued else self._processor
        return processor.encode(texts, num_threads=-1 if parallel else 1)

    def cut(self, text: str) -> int | None:
        """Return the last place where no piece has both neighbours; with a normaliser, only before a space."""
        if (rule := self._cut_rule) is None:
            return None
        return last_cut(text, rule, lambda texts: self.encode(texts, parallel=False, continued=True))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))


def _why(error: Exception) -> str:
    """Return the limit in SentencePiece's message as a clause; "" for another message."""
    if most := re.search(r"value <= (\d+)", str(error)):
        return f": it has text for at most {most[1]}"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        return f": its characters alone need {least[1]}"
    return ""


def sample_lines(texts: Iterable[str], budget: int) -> list[str]:
    """Return every k-th line that is not empty, k the smallest power of two with at most `budget` characters."""
    kept: list[str] = []
    stride, size, seen = 1, 0, 0
    for text in texts:
        for line in _lines(text):
            if seen % stride == 0:
                kept.append(line)
                size += len(line)
            seen += 1
            while size > budget and len(kept) > 1:
                kept, stride = kept[::2], stride * 2
                size = sum(map(len, kept))
    return kept


def _lines(text: str) -> Iterable[str]:
    for line in text.split("\n"):
        for start in range(0, len(line), _LONGEST_LINE):
            yield line[start : start + _LONGEST_LINE]
