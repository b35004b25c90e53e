"""The largest input of every linear layer while a model reads text, from which `static` scales are made."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowprec_train.precision import policy
from lowprec_train.tools.evaluate import texts
from lowprec_train.tools.evaluate.evaluation import tokenizer_of
from lowprec_train.tools.evaluate.perplexity import Cutting, score_all
from lowprec_train.train.trained import OF_RUN, Trained

WINDOWS = 64


def input_amax(trained: Trained, path: Path, tokenizer: Path | None) -> dict[str, float]:
    """max |x| by linear layer, over the first windows of a text or prepared set, in the forward pass of training.

    Raises ValueError for text that cannot be read, and where there is none.
    """
    if not (path.exists() or path.with_name(f"{path.name}.idx").exists()):
        raise ValueError(f"--calibration {path}: neither text nor a prepared set is there")
    source = texts.open_text(path, field="text", tokenizer=tokenizer_of(trained, tokenizer))
    model, found = trained.model(OF_RUN, device=torch.device("cpu")), dict[str, float]()
    length = trained.weights.model.max_seq_len
    start = None if source.tokenizer is None else source.tokenizer.eod
    how = Cutting(seq_len=length, stride=length, batch=1, start=start)
    windows = (window for document in how.taken(source, model.vocab_size) for window in how.windows(document))
    for name, linear in policy.named_linears(model):
        linear.register_forward_pre_hook(_keeping(found, name))
    if not score_all(model, islice(windows, WINDOWS), how.batch):
        raise ValueError(f"--calibration {path}: no text to read")
    return found


def _keeping(found: dict[str, float], name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def keep(_: Any, inputs: tuple[Tensor, ...]) -> None:
        found[name] = max(found.get(name, 0.0), float(inputs[0].abs().max()))

    return keep
