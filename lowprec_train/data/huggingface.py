"""Tokenizers in the `tokenizer.json` format of Hugging Face's `tokenizers` library, which must be installed.

The file does not say which of its special tokens ends a document. `eos_token` of the `tokenizer_config.json` beside it
says so, if there is one; otherwise the only special token with a known name is used. The user's choice is stored in
such a `tokenizer_config.json`, so that later readers use the same token.

Documents are plain text: `<|endoftext|>` in a document gives ordinary pieces, not the special token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lowprec_train.data.cuts import last_cut
from lowprec_train.data.endings import NoEnding
from lowprec_train.data.huggingface_cuts import CutRule

ENDINGS = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<|eod|>", "<eos>", "</s>", "[EOS]")  # seen in published models
_CONFIG = "tokenizer_config.json"


class HuggingFaceTokenizer:
    """A `Tokenizer` from the text of a `tokenizer.json` and its `tokenizer_config.json`. `eod`: ends a document.

    Raises:
        ValueError: not such a file, no token of this name, or, without a name, no candidate or several.
    """

    file_name = "tokenizer.json"

    def __init__(self, content: str, config: dict[str, Any], name: str, eod: str | None = None) -> None:
        self._content, self._config = content, config
        self._tokenizer = _parse(content, name)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._ending = eod or _written(config) or _known_ending(self._tokenizer, name)
        if self._ending not in vocabulary:
            raise NoEnding(f"{name}: has no token {self._ending!r} to end documents with")
        self.eod = vocabulary[self._ending]

    @classmethod
    def read(cls, path: Path, eod: str | None = None) -> HuggingFaceTokenizer:
        """Read the file, and the configuration beside it. Raises ValueError as the class does."""
        beside = path.with_name(_CONFIG)
        try:
            config = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
            if not isinstance(config, dict):
                raise ValueError(f"{beside}: has a {type(config).__name__}, not an object")
            return cls(path.read_text(encoding="utf-8"), config, str(path), eod)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from error

    @property
    def files(self) -> dict[str, bytes]:
        """The original file, and a configuration that names the end-of-document token."""
        config = json.dumps({**self._config, "eos_token": self._ending}, indent=2, ensure_ascii=False) + "\n"
        return {self.file_name: self._content.encode(), _CONFIG: config.encode()}

    @property
    def digest(self) -> str:
        """SHA-256 of the file and the end-of-document token."""
        return hashlib.sha256(f"{self._content}\0{self._ending}".encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        import tokenizers

        return {"tokenizers": tokenizers.__version__}

    def encode(self, texts: list[str], *, parallel: bool = True, continued: bool = False) -> list[list[int]]:
        tokenizer = self._continuing if continued else self._tokenizer
        if parallel:
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        else:
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [each.ids for each in encoded]

    def cut(self, text: str) -> int | None:
        """Return the last place to cut, at an end of a word; None if the tokenizer has unknown parts (`CutRule`)."""
        if (rule := self._cut_rule) is None:
            return None
        return last_cut(text, rule, lambda texts: self.encode(texts, parallel=False, continued=True))

    @cached_property
    def _cut_rule(self) -> CutRule | None:
        return CutRule.of(self._content, self._tokenizer.get_vocab(with_added_tokens=False), _spell_bytes)

    @cached_property
    def _continuing(self) -> Any:
        """The tokenizer for text after a cut: without the space that the file may put before a text."""
        rule = self._cut_rule
        return self._tokenizer if rule is None else _parse(rule.continuing, "after a cut")

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _parse(content: str, name: str) -> Any:
    """Return the library's tokenizer, without padding, truncation and special tokens in text."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"{name} needs the package 'tokenizers': pip install 'lowprec_train[data]'") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{name}: not a tokenizer.json that can be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


@lru_cache(maxsize=1 << 16)
def _spell_bytes(text: str) -> str:
    """Return the bytes of a text as byte-level pieces spell them, one character per byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(spelled)


def _written(config: dict[str, Any]) -> str | None:
    """Return `eos_token` as transformers writes it: a string, or an object with `content`."""
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _known_ending(tokenizer: Any, name: str) -> str:
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    found = [ending for ending in ENDINGS if ending in special]
    if len(found) != 1:
        raise NoEnding(
            f"{name}: it is unknown which token ends a document; name it with --eod. "
            f"Special tokens: {special or 'none'}"
        )
    return found[0]
