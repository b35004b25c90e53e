"""Tokenizer files of an exported model, with which `AutoTokenizer` yields the token ids of the training data.

The tokenizer of a run is named in run.json; the tokenizer files of an imported model are exported unchanged.
`split_special_tokens` keeps text that spells the end-of-document token from being encoded as that token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowprec_train.config import read_object
from lowprec_train.data.endings import NoEnding
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import check_vocabulary, load
from lowprec_train.tools.huggingface import from_sentencepiece
from lowprec_train.train.weights import tokenizer_of

NONE = Path("none")
CONFIG, CLASS = "tokenizer_config.json", "PreTrainedTokenizerFast"
# A model-specific tokenizer class would ignore the post-processor of tokenizer.json and prepend a BOS token.
AS_TRAINED = {"tokenizer_class": CLASS, "add_bos_token": False, "add_eos_token": False}
FILES: tuple[str, ...] = ("tokenizer.json", "tokenizer.model", CONFIG, "special_tokens_map.json", "added_tokens.json")
FILES += ("vocab.json", "merges.txt", "chat_template.jinja")


def find(directory: Path, requested: Path | None) -> Path | None:
    """Return the path of a model's tokenizer: the requested one (`none`: no tokenizer), else that of run.json or the
    directory.

    Raises ValueError if the tokenizer that run.json names is missing or has changed.
    """
    if requested is not None:
        return None if requested == NONE else requested
    path = tokenizer_of(directory)
    if path is None or path.exists():
        return path
    raise ValueError(f"{directory}: its tokenizer {path} does not exist; pass --tokenizer FILE or --tokenizer none")


def of_model(
    directory: Path, requested: Path | None, *, max_length: int, vocab_size: int | None = None
) -> tuple[dict[str, bytes], int | None]:
    """Return tokenizer files by name, and the end-of-document token id; ({}, None) for a model without a tokenizer.

    requested, and errors: as in `find` and `exported`. max_length: of the model's sequences, in tokens. vocab_size: of
    the model. Raises ValueError if the tokenizer has more pieces.
    """
    path = find(directory, requested)
    if path is None:
        return {}, None
    if path != directory:
        if vocab_size is not None:
            pieces = load(path).vocab_size
            check_vocabulary(tokenizer=pieces, vocab_size=vocab_size, name=str(path), setting="the model's vocab_size")
        return exported(path, max_length=max_length)
    try:
        return read_files(path), load(path).eod
    except NoEnding:
        return read_files(path), None


def exported(path: Path, *, max_length: int) -> tuple[dict[str, bytes], int]:
    """Return Hugging Face files for a tokenizer of this package, and its end-of-document token id.

    Raises ValueError for a missing tokenizer and for one without an equivalent tokenizer.json.
    """
    tokenizer = load(path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        text = from_sentencepiece.tokenizer_json(tokenizer.content, str(path))
        files = {"tokenizer.json": text.encode()}
        config: dict[str, Any] = dict(from_sentencepiece.special_pieces(tokenizer.content))
    else:
        files = dict(tokenizer.files)
        files["tokenizer.json"] = without_special_tokens(files["tokenizer.json"])
        config = json.loads(files[CONFIG]) | AS_TRAINED
    defaults = {
        "tokenizer_class": CLASS,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    files[CONFIG] = _json(defaults | config)
    return files, tokenizer.eod


def without_special_tokens(content: bytes) -> bytes:
    """Remove a post-processor that adds special tokens from a tokenizer.json: training data has none of them."""
    from tokenizers import Tokenizer as Parsed

    if not Parsed.from_buffer(content).num_special_tokens_to_add(False):
        return content
    return _json(json.loads(content) | {"post_processor": None})


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the tokenizer files of a directory, unchanged. Raises ValueError for an unreadable one."""
    files = {name: directory / name for name in FILES if (directory / name).is_file()}
    for file in files.values():
        if file.suffix == ".json":
            read_object(file)
    return {name: file.read_bytes() for name, file in files.items()}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
