"""Places where a tokenizer of Hugging Face's library may cut text, from the parts that its `tokenizer.json` names.

A pre-tokenizer that splits at white space and punctuation (the patterns of GPT-2, GPT-4, LLaMA 3, Qwen, BERT;
Metaspace) ends a word before a space or a line break that follows a letter or digit, and begins the next word there,
whatever text is further away. Byte-pair encoding allows two more kinds of cuts: before punctuation that follows a
letter; and, if bytes are encoded without a normaliser, between two characters of a script without words or two symbols,
if no piece has their bytes as neighbours. A tokenizer without pre-tokenizer (LLaMA 2) merges over the whole text: it
allows a cut wherever no piece has the two neighbours.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowprec_train.data.cuts import neighbours

_SPACE = "▁"  # a space in pieces of Metaspace and similar tokenizers
_WORDS = {
    "ByteLevel",
    "Split",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "Metaspace",
    "BertPreTokenizer",
}
_LOCAL = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled", "Nmt", "Replace"}
_ANCHORED = re.compile(r"\(\?<[=!]|\\[AbBGzZ]|(?<!\[)\^|\$(?=$|[|)])")  # lookbehind, or anchors at the ends of the text
_COUNTED = re.compile(r"(?<!\\[xu])\{(\d+)(?:,(\d+))?\}")  # a bounded number of repetitions
_NUMBERS = re.compile(r"(?:\\p\{N[dlo]?\}|\\d|\[0-9\])$")  # digits, which end where a cut may be
_SEVERAL = re.compile(r"(?<!\\)\.|(\\[a-zA-Z](?:\{\w+\})?|\[[^\]]*\])\1(?![+*])")  # any character, or one class twice
_MARKS = frozenset("'’`´")  # in words, or part of a word


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Decides whether text may be cut between two characters. `continuing`: the JSON tokenizer for text after a cut.

    joined: neighbours inside of a piece, as pieces spell them. spelled: spells a text as pieces do.
    added: neighbours inside of an added token, which is searched in the text itself.
    words: cut only at ends of words. signs, runs: also before punctuation, inside of runs (see above).
    alphabet: characters that are pieces; unknown neighbours become one token. None: unknown ones are spelled in bytes.
    """

    joined: frozenset[str]
    spelled: Callable[[str], str]
    added: frozenset[str]
    words: bool
    signs: bool
    runs: bool
    alphabet: frozenset[str] | None
    continuing: str

    def __call__(self, left: str, right: str) -> bool:
        if self.words and not self._ends(left, right):
            return False
        end, begin = self.spelled(left)[-1:], self.spelled(right)[:1]
        known = self.alphabet is None or end in self.alphabet or begin in self.alphabet
        return known and end + begin not in self.joined and left + right not in self.added

    def _ends(self, left: str, right: str) -> bool:
        """Return whether a word ends before the cut and another begins after it, or a run of one kind goes on."""
        before, after = unicodedata.category(left), unicodedata.category(right)
        if right in " \n":
            return before[0] in ("LN" if right == "\n" else "LNMPS")
        if self.signs and before[0] == "L" and after[0] in "PS":
            return right not in _MARKS
        return self.runs and before == after and before in ("Lo", "So")

    @classmethod
    def of(cls, content: str, vocabulary: Iterable[str], spell_bytes: Callable[[str], str]) -> CutRule | None:
        """Return the rule of a tokenizer; None if one of its parts is unknown, or acts on the text as a whole."""
        parts = json.loads(content)
        model, splits = parts["model"], [*_flat(parts.get("pre_tokenizer"))]
        kinds, changes = {each["type"] for each in splits}, [*_flat(parts.get("normalizer"))]
        added = [each["content"] for each in parts.get("added_tokens", ()) if not each["special"]]
        prepends = any(each["type"] == "Prepend" for each in changes)
        changed = {each["type"] for each in changes} - {"Prepend"}
        merges = model["type"] == "BPE" and not any(
            model.get(each) for each in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        words = any(map(_splits, splits))
        if not (kinds <= _WORDS and changed <= _LOCAL) or (prepends and added) or any(map(_far, splits + changes)):
            return None
        if not words and not (merges and all(map(_is_space, changes))):
            return None
        in_bytes = "ByteLevel" in kinds
        pieces = [*vocabulary]
        whole = merges and not words
        return cls(
            joined=neighbours(pieces),
            spelled=spell_bytes if in_bytes else _with_space,
            added=neighbours(added),
            words=words,
            signs=merges,
            runs=merges and in_bytes and not changes and not model.get("ignore_merges"),
            alphabet=frozenset(pieces) if whole and not (in_bytes or model.get("byte_fallback")) else None,
            continuing=json.dumps(parts | {"normalizer": _without_prepend(parts.get("normalizer"))}),
        )


def _flat(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence of normalisers or pre-tokenizers, or the part itself."""
    if part is None:
        return
    inner = part.get("normalizers", part.get("pretokenizers"))
    if inner is None:
        yield part
    else:
        for each in inner:
            yield from _flat(each)


def _splits(part: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits text into words: some only respell it."""
    return bool(part.get({"ByteLevel": "use_regex", "Metaspace": "split"}.get(part["type"], ""), True))


def _far(part: Mapping[str, Any]) -> bool:
    """Return whether a pattern depends on text to the left of a cut: by lookbehind, or because it counts from there."""
    pattern = part.get("pattern") or {}
    text = pattern.get("Regex", "") if isinstance(pattern, dict) else ""
    return _ANCHORED.search(text) is not None or (part["type"] == "Split" and _counts(text))


def _counts(text: str) -> bool:
    """Return whether a pattern takes a bounded number of other characters than digits, counted from a text's start."""
    bounded = (each for each in _COUNTED.finditer(text) if int(each[2] or each[1]) > 1)
    others = any(not _NUMBERS.search(text[: each.start()]) for each in bounded)
    return others or _SEVERAL.search(text) is not None


def _is_space(change: Mapping[str, Any]) -> bool:
    """Return whether a normaliser only spells a space, or only puts one before a text."""
    spells = change.get("pattern") == {"String": " "} and change.get("content") == _SPACE
    return change["type"] == "Prepend" or (change["type"] == "Replace" and spells)


def _with_space(text: str) -> str:
    return text.replace(" ", _SPACE)


def _without_prepend(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kept = [each for each in _flat(part) if each["type"] != "Prepend"]
    return {"type": "Sequence", "normalizers": kept} if kept else None
