"""A small model with a tokenizer of its own and text to evaluate it on, raw and prepared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowprec_train.data.indexed import token_dtype
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import store
from lowprec_train.train import build
from tests.data.indexed_files import write_indexed
from tests.recipes import composed
from tests.saved import save

WORDS = ["loss", "scale", "tile", "token", "block", "codes", "draws", "layer", "model", "train", "valid", "epoch"]
TEXTS = [" ".join(WORDS[(i * k + i // 3) % 12] for i in range(4 + 31 * k % 150)) for k in range(14)]
TEXTS += ["", "x", "naïve café, 数字 \U0001f9ea and\nlines\n\n", "tile " * 70]
MODEL = ("model.layers=2", "model.vocab_size=384", "model.max_seq_len=64", "data.seq_len=32", "model.dim=64")
MODEL += ("model.ffn=128", "model.heads=4", "model.kv_heads=2", "micro_batch=2", "tokens_per_step=64", "steps=4")


@dataclass(frozen=True)
class Subject:
    """A run with recipe fp4, its tokenizer, and its text as .jsonl and as a prepared set."""

    run: Path
    tokenizer: SentencePieceTokenizer
    raw: Path
    prefix: Path


def subject(root: Path) -> Subject:
    """Made without training: weights are drawn, large enough for losses to differ from token to token."""
    tokenizer = SentencePieceTokenizer.train(TEXTS, 384, "texts")
    file = store(tokenizer, root)
    raw, prefix = root / "texts.jsonl", root / "texts"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    write_indexed(prefix, ([*ids, tokenizer.eod] for ids in tokenizer.encode(TEXTS)), token_dtype(384))
    run = composed("+recipe=fp4", *MODEL)
    model = build.layout(run).model
    build.weights(model, torch.device("cpu"), 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.empty(parameter.shape).normal_(0.0, 0.08, generator=generator))
    return Subject(save(root / "run", run, model, 4, recipe="fp4", tokenizer=file), tokenizer, raw, prefix)


def documents_of_bin(prefix: Path, eod: int) -> list[list[int]]:
    """A prepared set read as what it is: numbers with an end-of-document token behind each document."""
    ids = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == eod) + 1)[:-1]]
