"""The tokenizer's files of an exported model: what makes `AutoTokenizer` yield the ids that the model was trained on.

A run names its corpus's tokenizer in run.json, an imported model brings its own files, which go out as they came in.
`split_special_tokens` says that text is text: a document that spells the end-of-document token does not end there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowprec_train.config import read_object
from lowprec_train.data.endings import NoEnding
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import load
from lowprec_train.tools.huggingface import from_sentencepiece
from lowprec_train.train.weights import tokenizer_of

NONE = Path("none")
CONFIG, CLASS = "tokenizer_config.json", "PreTrainedTokenizerFast"
# A class of its own would build its tokenizer anew and put a token before each text, whatever tokenizer.json says.
AS_TRAINED = {"tokenizer_class": CLASS, "add_bos_token": False, "add_eos_token": False}
FILES: tuple[str, ...] = ("tokenizer.json", "tokenizer.model", CONFIG, "special_tokens_map.json", "added_tokens.json")
FILES += ("vocab.json", "merges.txt", "chat_template.jinja")


def found(directory: Path, asked: Path | None) -> Path | None:
    """Where the tokenizer of a model lies: as asked for (`none`: nowhere), else what run.json names, else beside it.

    Raises ValueError when it was there once and is no more, or is another one by now.
    """
    if asked is not None:
        return None if asked == NONE else asked
    path = tokenizer_of(directory)
    if path is None or path.exists():
        return path
    raise ValueError(f"{directory}: its tokenizer {path} is not there any more; --tokenizer FILE or --tokenizer none")


def of_model(directory: Path, asked: Path | None, *, max_length: int) -> tuple[dict[str, bytes], int | None]:
    """Files by name of a model's tokenizer, and the id of the token that ends a document; nothing where it has none.

    asked, and what is raised: as in `found` and `exported`. max_length: longest sequence of the model.
    """
    path = found(directory, asked)
    if path is None:
        return {}, None
    if path != directory:
        return exported(path, max_length=max_length)
    try:
        return copied(path), load(path).eod
    except NoEnding:
        return copied(path), None


def exported(path: Path, *, max_length: int) -> tuple[dict[str, bytes], int]:
    """Files for a tokenizer of ours.

    Raises ValueError when there is none, and for one without an equivalent in a tokenizer.json.
    """
    tokenizer = load(path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        text = from_sentencepiece.tokenizer_json(tokenizer.content, str(path))
        files = {"tokenizer.json": text.encode()}
        config: dict[str, Any] = dict(from_sentencepiece.special_pieces(tokenizer.content))
    else:
        files = dict(tokenizer.files)
        files["tokenizer.json"] = without_additions(files["tokenizer.json"])
        config = json.loads(files[CONFIG]) | AS_TRAINED
    about = {
        "tokenizer_class": CLASS,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    files[CONFIG] = _json(about | config)
    return files, tokenizer.eod


def without_additions(content: bytes) -> bytes:
    """A tokenizer.json that puts no token before or behind a text: data is tokenised without them. One whose
    post-processor adds none is returned as it is.
    """
    from tokenizers import Tokenizer as Parsed

    if not Parsed.from_buffer(content).num_special_tokens_to_add(False):
        return content
    return _json(json.loads(content) | {"post_processor": None})


def copied(directory: Path) -> dict[str, bytes]:
    """A model's tokenizer files as they are. Raises ValueError for one that cannot be read."""
    files = {name: directory / name for name in FILES if (directory / name).is_file()}
    for file in files.values():
        if file.suffix == ".json":
            read_object(file)
    return {name: file.read_bytes() for name, file in files.items()}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
