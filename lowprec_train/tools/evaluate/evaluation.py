"""The evaluation of one model under several recipes, on a text, on tasks, or both.

Recipes with equal forward passes are evaluated once: MXFP4, for example, trains with a BF16 forward pass.
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
from lowprec_train.train.trained import Trained


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The inputs of an evaluation, checked before the weights are loaded.

    computed_as: requested recipe -> first requested recipe with the same forward pass.
    """

    trained: Trained
    computed_as: dict[str, str]
    source: texts.Source | None
    cutting: Cutting
    tasks: Sequence[Path]
    tokenizer: Tokenizer | None
    device: torch.device

    @classmethod
    def of(cls, options: argparse.Namespace) -> Evaluation:
        """Check the options of `lowprec evaluate`. Raises ValueError for invalid options."""
        if options.data is None and not options.tasks:
            raise ValueError("nothing to evaluate: give --data PATH, --tasks FILE or both")
        if options.limit is not None and options.limit < 1:
            raise ValueError(f"--limit {options.limit} must be at least 1")
        for file in options.tasks:
            if not file.is_file():
                raise ValueError(f"{file}: no such task file")
        if options.tasks:
            needs_package("lm_eval", extra="eval", what="--tasks")
        trained = Trained(options.model, options.step)
        tokenizer = tokenizer_of(trained, options.tokenizer)
        if options.tasks:
            if tokenizer is None:
                raise ValueError(f"--tasks: {options.model} has no tokenizer; give one with --tokenizer FILE")
            from lowprec_train.tools.evaluate import harness

            harness.check(options.tasks, trained.weights.model.max_seq_len)
        source = None
        if options.data is not None:
            source = texts.open_text(options.data, field=options.field, tokenizer=tokenizer, skip_bad=options.skip_bad)
        tokenizer = tokenizer or (source.tokenizer if source else None)
        return cls(
            trained=trained,
            computed_as=trained.computed_as(options.recipes),
            source=source,
            cutting=_cutting(trained, options, tokenizer),
            tasks=options.tasks,
            tokenizer=tokenizer,
            device=checks.device(options.device),
        )

    def results(self) -> dict[str, Any]:
        """All results as a JSON-serialisable dictionary."""
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
            found["tasks"] = {recipe: tasks[computed] for recipe, computed in self.computed_as.items()}
        return found

    def _compute(self, recipe: str, measured: dict[str, Measured], tasks: dict[str, Any]) -> None:
        """Evaluate under one recipe and add the results. The model is freed before the next one is loaded."""
        model = self.trained.model(recipe, device=self.device)
        if self.tasks:  # before the text: errors in task files may appear only now
            from lowprec_train.tools.evaluate import harness

            assert self.tokenizer is not None
            adapter = harness.Answering(model, self.tokenizer, self.cutting.batch)
            tasks[recipe] = harness.run_tasks(adapter, self.tasks, self.cutting.documents)
        if self.source is not None:
            with progress.of_evaluation(recipe) as report_tokens:
                measured[recipe] = measure(model, self.source, self.cutting, report_tokens)

    def _text(self, measured: dict[str, Measured]) -> dict[str, Any]:
        of = {recipe: measured[computed] for recipe, computed in self.computed_as.items()}
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


def tokenizer_of(trained: Trained, file: Path | None) -> Tokenizer | None:
    """The tokenizer in `file`, or else that of the model; None if there is none.

    Raises ValueError if its vocabulary does not fit the model.
    """
    path = tokenizers.find(trained.directory, file)
    if path is None:
        return None
    tokenizer = load(path)
    check_vocabulary(tokenizer=tokenizer.vocab_size, vocab_size=trained.weights.model.vocab_size, name=str(path))
    return tokenizer


def start_token(start: str, tokenizer: Tokenizer | None, vocab_size: int) -> int | None:
    """The token id that precedes each document, from --start; None for no token.

    Raises ValueError for a bad id, and for `eod` without a tokenizer.
    """
    if start == "none":
        return None
    if start == "eod":
        if tokenizer is None:
            raise ValueError(
                "--start eod: without a tokenizer the end-of-document token is unknown; give --tokenizer FILE, "
                "--start none or the token's id"
            )
        return tokenizer.eod
    if not start.isdecimal() or int(start) >= vocab_size:
        raise ValueError(f"--start {start} must be eod, none or a token id below {vocab_size}")
    return int(start)


def _cutting(trained: Trained, options: argparse.Namespace, tokenizer: Tokenizer | None) -> Cutting:
    model = trained.weights.model
    seq_len = (_trained_length(trained) or model.max_seq_len) if options.seq_len is None else options.seq_len
    stride = seq_len if options.stride is None else options.stride
    windows.check(seq_len=seq_len, stride=stride, batch=options.batch, max_seq_len=model.max_seq_len)
    start = start_token(options.start, tokenizer, model.vocab_size)
    return Cutting(seq_len=seq_len, stride=stride, batch=options.batch, start=start, documents=options.limit)


def _trained_length(trained: Trained) -> int | None:
    """Sequence length of the training run; None for an imported model."""
    saved = trained.directory / "config.yaml"
    return OmegaConf.select(read_yaml(saved), "data.seq_len") if saved.is_file() else None
