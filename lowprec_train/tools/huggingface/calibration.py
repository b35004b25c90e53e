"""Calibration of static activation scales: the input amax of every linear layer over a text."""

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
    """Input amax of each linear layer over the first WINDOWS windows of a text or prepared set.

    The forward pass is that of training, with the run's recipe. Raises ValueError for a missing, unreadable or empty
    text.
    """
    if not (path.exists() or path.with_name(f"{path.name}.idx").exists()):
        raise ValueError(f"--calibration {path}: no such file or prepared set; name a text file or a set's prefix")
    source = texts.open_text(path, field="text", tokenizer=tokenizer_of(trained, tokenizer))
    model, amax = trained.model(OF_RUN, device=torch.device("cpu")), dict[str, float]()
    length = trained.weights.model.max_seq_len
    start = None if source.tokenizer is None else source.tokenizer.eod
    cutting = Cutting(seq_len=length, stride=length, batch=1, start=start)
    windows = (window for document in cutting.taken(source, model.vocab_size) for window in cutting.windows(document))
    for name, linear in policy.named_linears(model):
        linear.register_forward_pre_hook(_amax_hook(amax, name))
    if not score_all(model, islice(windows, WINDOWS), cutting.batch):
        raise ValueError(f"--calibration {path} holds no text; name another one")
    return amax


def _amax_hook(amax: dict[str, float], name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def update(_: Any, inputs: tuple[Tensor, ...]) -> None:
        amax[name] = max(amax.get(name, 0.0), float(inputs[0].abs().max()))

    return update
