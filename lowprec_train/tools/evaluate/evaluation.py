"""One call of `lowprec evaluate`: a model under several recipes, on one text and some tasks.

Recipes that compute the same forward pass (MXFP4 trains with a forward pass in BF16) are computed once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lowprec_train.config import read_yaml
from lowprec_train.data.tokenizer import Tokenizer, check_vocabulary, load
from lowprec_train.model.transformer import Transformer
from lowprec_train.precision.schedule import Phase
from lowprec_train.tools.evaluate import progress, texts, windows
from lowprec_train.tools.evaluate.perplexity import Cutting, Measured, difference, measure
from lowprec_train.tools.huggingface import tokenizer as tokenizers
from lowprec_train.train import checks
from lowprec_train.train.packages import needs_package
from lowprec_train.train.trained import Trained, dtype_of


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One way to compute. asked: as on the command line; name: of the recipe itself."""

    asked: str
    name: str
    forward: Phase
    dtype: torch.dtype

    def alike(self, other: Precision) -> bool:
        """Whether the forward passes are the same."""
        return self.forward == other.forward and self.dtype == other.dtype

    def model(self, trained: Trained, device: torch.device) -> Transformer:
        """The model that computes so."""
        return trained.model(self.asked, device=device)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for. Values and their meaning: the options of `lowprec evaluate`; None: its default."""

    model: Path
    recipes: Sequence[str]
    step: int | None = None
    data: Path | None = None
    tasks: Sequence[Path] = ()
    seq_len: int | None = None
    stride: int | None = None
    batch: int = 8
    start: str = "eod"
    limit: int | None = None
    field: str = "text"
    tokenizer: Path | None = None
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, checked before any weight is read."""

    trained: Trained
    precisions: Sequence[Precision]
    source: texts.Source | None
    cutting: Cutting
    tasks: Sequence[Path]
    tokenizer: Tokenizer | None
    device: torch.device

    @classmethod
    def of(cls, asked: Request) -> Evaluation:
        """Raises ValueError for what cannot be evaluated."""
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
        if asked.tasks and tokenizer is None:
            raise ValueError(f"{asked.model} has no tokenizer to read tasks with: name it with --tokenizer")
        if asked.tasks:
            _harness().check(asked.tasks)
        source = asked.data and texts.open_text(asked.data, field=asked.field, tokenizer=tokenizer)
        tokenizer = tokenizer or (source.tokenizer if source else None)
        return cls(
            trained=trained,
            precisions=[precision(trained, recipe) for recipe in dict.fromkeys(asked.recipes)],
            source=source or None,
            cutting=_cutting(trained, asked, tokenizer),
            tasks=asked.tasks,
            tokenizer=tokenizer,
            device=checks.device(asked.device),
        )

    def results(self) -> dict[str, Any]:
        """Everything measured, as JSON holds it."""
        measured: dict[str, Measured] = {}
        tasks: dict[str, Any] = {}
        for each in self.precisions:
            if self._computed(each) is each:
                self._compute(each, measured, tasks)
        once = {each.asked: self._computed(each).asked for each in self.precisions}
        found = self._subject() | {"recipes": {each.asked: each.name for each in self.precisions}, "computed_as": once}
        if measured:
            found["text"] = self._text(measured, once)
        if tasks:
            found["tasks"] = {asked: tasks[how] for asked, how in once.items()}
        return found

    def _compute(self, precision: Precision, measured: dict[str, Measured], tasks: dict[str, Any]) -> None:
        """Adds what one model gives, which is gone before the next is read."""
        model = precision.model(self.trained, self.device)
        if self.tasks:  # first: the harness may find late that a task does not fit its data
            tasks[precision.asked] = self._tasks(model)
        if self.source is not None:
            with progress.shown(precision.asked) as told:
                measured[precision.asked] = measure(model, self.source, self.cutting, told)

    def _computed(self, precision: Precision) -> Precision:
        """The first that computes as this one does."""
        return next(each for each in self.precisions if each.alike(precision))

    def _tasks(self, model: Transformer) -> dict[str, Any]:
        harness = _harness()
        answering = harness.Answering(model, self.tokenizer, self.cutting.batch)
        found: dict[str, Any] = harness.run_tasks(answering, self.tasks, self.cutting.documents)
        return found

    def _subject(self) -> dict[str, Any]:
        return {
            "model": str(self.trained.directory),
            "step": self.trained.step,
            "name": self.trained.weights.model.name,
            "device": str(self.device),
            "seq_len": self.cutting.seq_len,
            "stride": self.cutting.stride,
            "batch": self.cutting.batch,
            "start": self.cutting.start,
        }

    def _text(self, measured: dict[str, Measured], once: dict[str, str]) -> dict[str, Any]:
        extent = next(iter(measured.values())).extent
        assert self.source is not None
        results = {asked: _figures(measured[how]) for asked, how in once.items()}
        last = measured[once[self.precisions[-1].asked]]
        against = {asked: vars(difference(measured[how], last)) for asked, how in list(once.items())[:-1]}
        return {
            "data": self.source.name,
            **vars(extent),
            "results": results,
            "differences": {"to": self.precisions[-1].asked, "of": against},
        }


def _harness() -> Any:
    """The module that needs lm_eval, whose import takes seconds."""
    return importlib.import_module("lowprec_train.tools.evaluate.harness")


def precision(trained: Trained, asked: str) -> Precision:
    """Raises ValueError for an unknown recipe, and for one that does not fit the model."""
    return Precision(
        asked=asked, name=trained.recipe_name(asked), forward=trained.forward(asked), dtype=dtype_of(asked)
    )


def tokenizer_of(trained: Trained, asked: Path | None) -> Tokenizer | None:
    """The tokenizer asked for, else the model's own; None where none is known. Raises ValueError for an unfit one."""
    path = tokenizers.found(trained.directory, asked)
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


def _cutting(trained: Trained, asked: Request, tokenizer: Tokenizer | None) -> Cutting:
    model = trained.weights.model
    seq_len = (_trained_length(trained) or model.max_seq_len) if asked.seq_len is None else asked.seq_len
    stride = seq_len if asked.stride is None else asked.stride
    windows.check(seq_len=seq_len, stride=stride, batch=asked.batch, max_seq_len=model.max_seq_len)
    start = start_token(asked.start, tokenizer, model.vocab_size)
    return Cutting(seq_len=seq_len, stride=stride, batch=asked.batch, start=start, documents=asked.limit)


def _trained_length(trained: Trained) -> int | None:
    """Tokens of a sequence of the run."""
    saved = trained.directory / "config.yaml"
    return OmegaConf.select(read_yaml(saved), "data.seq_len") if saved.is_file() else None


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        "loss": measured.loss,
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte,
        "tokens_per_second": measured.extent.tokens / measured.seconds,
    }
