"""One call of `lowprec evaluate`: a model under several recipes, on one text and some tasks.

Recipes that compute the same forward pass (MXFP4 trains with a forward pass in BF16) are computed once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lowprec_train.config import read_yaml
from lowprec_train.data.tokenizer import Tokenizer, check_vocabulary, load
from lowprec_train.tools import progress
from lowprec_train.tools.evaluate import texts, windows
from lowprec_train.tools.evaluate.perplexity import Cutting, Measured, difference, measure
from lowprec_train.tools.huggingface import tokenizer as tokenizers
from lowprec_train.train import checks
from lowprec_train.train.packages import needs_package
from lowprec_train.train.trained import Trained, dtype_of


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, checked before any weight is read.

    computed_as: each recipe of the command line -> the first of them that computes the same forward pass.
    """

    trained: Trained
    computed_as: dict[str, str]
    source: texts.Source | None
    cutting: Cutting
    tasks: Sequence[Path]
    tokenizer: Tokenizer | None
    device: torch.device

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Evaluation:
        """asked: the options of `lowprec evaluate`. Raises ValueError for what cannot be evaluated."""
        if asked.data is None and not asked.tasks:
            raise ValueError("nothing to evaluate on: --data PATH, --tasks FILE or both")
        if asked.limit is not None and asked.limit < 1:
            raise ValueError(f"--limit {asked.limit} must be at least 1")
        for file in asked.tasks:
            if not file.is_file():
                raise ValueError(f"{file}: no such task file")
        if asked.tasks:
            needs_package("lm_eval", extra="eval", what="--tasks")
        trained = Trained(asked.model, asked.step)
        tokenizer = tokenizer_of(trained, asked.tokenizer)
        if asked.tasks:
            if tokenizer is None:
                raise ValueError(f"{asked.model} has no tokenizer to read tasks with: name it with --tokenizer")
            from lowprec_train.tools.evaluate import harness

            harness.check(asked.tasks)
        source = None
        if asked.data is not None:
            source = texts.open_text(asked.data, field=asked.field, tokenizer=tokenizer, skip_bad=asked.skip_bad)
        tokenizer = tokenizer or (source.tokenizer if source else None)
        return cls(
            trained=trained,
            computed_as=_computed_as(trained, asked.recipes),
            source=source,
            cutting=_cutting(trained, asked, tokenizer),
            tasks=asked.tasks,
            tokenizer=tokenizer,
            device=checks.device(asked.device),
        )

    def results(self) -> dict[str, Any]:
        """All results, as values that JSON can hold."""
        measured: dict[str, Measured] = {}
        tasks: dict[str, Any] = {}
        for recipe in dict.fromkeys(self.computed_as.values()):
            self._compute(recipe, measured, tasks)
        found = {
            "model": str(self.trained.directory),
            "step": self.trained.step,
            "name": self.trained.weights.model.name,
            "device": str(self.device),
            "seq_len": self.cutting.seq_len,
            "stride": self.cutting.stride,
            "batch": self.cutting.batch,
            "start": self.cutting.start,
            "recipes": {recipe: self.trained.recipe_name(recipe) for recipe in self.computed_as},
            "computed_as": self.computed_as,
        }
        if self.source is not None:
            found["text"] = {"data": self.source.name, **self._text(measured)}
        if tasks:
            found["tasks"] = {recipe: tasks[how] for recipe, how in self.computed_as.items()}
        return found

    def _compute(self, recipe: str, measured: dict[str, Measured], tasks: dict[str, Any]) -> None:
        """Add the results of one model, which is freed before the next one is read."""
        model = self.trained.model(recipe, device=self.device)
        if self.tasks:  # first: the harness may find late that a task does not fit its data
            from lowprec_train.tools.evaluate import harness

            assert self.tokenizer is not None
            answering = harness.Answering(model, self.tokenizer, self.cutting.batch)
            tasks[recipe] = harness.run_tasks(answering, self.tasks, self.cutting.documents)
        if self.source is not None:
            with progress.of_evaluation(recipe) as told:
                measured[recipe] = measure(model, self.source, self.cutting, told)

    def _text(self, measured: dict[str, Measured]) -> dict[str, Any]:
        of = {recipe: measured[how] for recipe, how in self.computed_as.items()}
        *others, last = of
        return {
            "documents": of[last].documents,
            "bytes": of[last].bytes,
            "tokens": of[last].tokens,
            "windows": len(of[last].nll),
            "results": {recipe: each.figures() for recipe, each in of.items()},
            "differences": {
                "to": last,
                "of": {recipe: vars(difference(of[recipe], of[last])) for recipe in others},
            },
        }


def _computed_as(trained: Trained, recipes: Sequence[str]) -> dict[str, str]:
    """Raises ValueError for an unknown recipe, and for one that does not fit the model."""
    passes = {recipe: (trained.forward(recipe), dtype_of(recipe)) for recipe in recipes}
    return {recipe: next(first for first in passes if passes[first] == passes[recipe]) for recipe in passes}


def tokenizer_of(trained: Trained, asked: Path | None) -> Tokenizer | None:
    """The tokenizer asked for, else the model's own; None where none is known. Raises ValueError for an unfit one."""
    path = tokenizers.find(trained.directory, asked)
    if path is None:
        return None
    tokenizer = load(path)
    check_vocabulary(tokenizer=tokenizer.vocab_size, vocab_size=trained.weights.model.vocab_size, name=str(path))
    return tokenizer


def start_token(asked: str, tokenizer: Tokenizer | None, vocab_size: int) -> int | None:
    """The token before each document; None: none. Raises ValueError for one that the model does not have."""
    if asked == "none":
        return None
    if asked == "eod":
        return None if tokenizer is None else tokenizer.eod
    if not asked.isdecimal() or int(asked) >= vocab_size:
        raise ValueError(f"--start {asked} is none of eod, none, and the ids below {vocab_size}")
    return int(asked)


def _cutting(trained: Trained, asked: argparse.Namespace, tokenizer: Tokenizer | None) -> Cutting:
    model = trained.weights.model
    seq_len = (_trained_length(trained) or model.max_seq_len) if asked.seq_len is None else asked.seq_len
    stride = seq_len if asked.stride is None else asked.stride
    windows.check(seq_len=seq_len, stride=stride, batch=asked.batch, max_seq_len=model.max_seq_len)
    start = start_token(asked.start, tokenizer, model.vocab_size)
    return Cutting(seq_len=seq_len, stride=stride, batch=asked.batch, start=start, documents=asked.limit)


def _trained_length(trained: Trained) -> int | None:
    """Sequence length that the run trained with; None for an imported model."""
    saved = trained.directory / "config.yaml"
    return OmegaConf.select(read_yaml(saved), "data.seq_len") if saved.is_file() else None
