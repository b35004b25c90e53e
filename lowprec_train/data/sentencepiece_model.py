"""SentencePiece byte-pair encoding that loses nothing: identity normalisation, byte fallback, newlines kept.

Training is single-threaded and takes its lines in a fixed order, so the same text gives the same model, byte for byte.
Lines are a thinned-out sample of the text: every k-th, with k doubling whenever the sample outgrows its budget.
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

SAMPLE_CHARACTERS = 16_000_000  # training takes about 0.2 s a million
_LONGEST_LINE = 1000  # characters; a longer one is learnt from in pieces (SentencePiece drops lines above 4192 bytes)

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
    """A SentencePiece `Tokenizer`; its end-of-sequence piece closes documents (`eod`, where given, must be that piece).

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
            raise NoEnding(f"{name}: has no end-of-sequence piece (eos_id {self.eod}) to close documents with")

    @cached_property
    def _cut_rule(self) -> CutRule | None:
        return CutRule.of(self.content, self._processor)

    @cached_property
    def _continuing(self) -> sentencepiece.SentencePieceProcessor:
        """For text after a cut: without the space that the model may put before a text."""
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
        """Learn `vocab_size` pieces from `sample` characters of the texts; `name` says in errors whose they are.

        Raises:
            ValueError: the text is too small or too varied for this vocabulary.
        """
        if sample < 1:
            raise ValueError(f"a sample of {sample} characters is none to learn from")
        if vocab_size < _LEAST:
            raise ValueError(
                f"vocab_size {vocab_size} is too small for a tokenizer: {_LEAST} pieces stand for bytes and signs"
            )
        lines = sample_lines(texts, sample)
        if not any(line.strip() for line in lines):
            raise ValueError(f"{name}: no text to learn a tokenizer from, or nothing but white space")
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
                f"{name}: no tokenizer of {vocab_size} pieces can be learnt from it{_why(error)}"
            ) from error
        return cls(model.getvalue(), name)

    def encode(self, texts: list[str], *, parallel: bool = True, continued: bool = False) -> list[list[int]]:
        processor = self._continuing if continued else self._processor
        ids: list[list[int]] = processor.encode(texts, num_threads=-1 if parallel else 1)
        return ids

    def cut(self, text: str) -> int | None:
        """Where no piece holds both neighbours; in text that is normalised, only before a space (`CutRule`)."""
        if (rule := self._cut_rule) is None:
            return None
        return last_cut(text, rule, lambda texts: self.encode(texts, parallel=False, continued=True))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(list(ids))
        return text


def _why(error: Exception) -> str:
    """The limit that SentencePiece's message names, as a clause; empty for another message."""
    if most := re.search(r"value <= (\d+)", str(error)):
        return f": it has text for at most {most[1]}"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        return f": its characters alone need {least[1]}"
    return ""


def sample_lines(texts: Iterable[str], budget: int) -> list[str]:
    """Every k-th non-empty line, k the smallest power of two that keeps the sample within `budget` characters."""
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
