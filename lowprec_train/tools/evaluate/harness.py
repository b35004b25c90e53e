"""Adapter of a model to lm-evaluation-harness (package `lm_eval`), under any recipe.

The harness sends three kinds of requests: the log-likelihood of a continuation after a context, the log-likelihood of
a text, and generation. Text is tokenised as in the harness's adapter for Hugging Face models, so an exported model
receives the same tokens there: no special token is added to a context, an empty context is the end-of-document token,
and a text that is too long is truncated on the left. A prompt and its answer share the positions of the model, so a
prompt is too long if it exceeds `max_seq_len - max_gen_toks`; a warning counts these.

Task files are YAML. The files and their data must be local: nothing is downloaded, and the libraries of the harness are
set to offline mode, regardless of environment variables.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows

from lowprec_train.data.tokenizer import Tokenizer
from lowprec_train.model.generation import Sampling, generate
from lowprec_train.model.transformer import Transformer
from lowprec_train.tools.evaluate.perplexity import score_all
from lowprec_train.tools.evaluate.windows import Window

LONGEST_ANSWER = 256  # tokens, if the task sets no max_gen_toks
# Modules with the offline flag of a library; the library reads the flag at each use.
OFFLINE = {
    "huggingface_hub.constants": "HF_HUB_OFFLINE",
    "datasets.config": "HF_HUB_OFFLINE",
    "evaluate.config": "HF_EVALUATE_OFFLINE",
}
RESAMPLES = 1000  # bootstrap samples, for standard errors of metrics without a formula
_log = logging.getLogger(__name__)


class Answering(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """`lm_eval` model interface of a model and its tokenizer. batch: requests of equal length in one forward pass."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch: int) -> None:
        super().__init__()
        self.model, self.texts, self.batch = model, tokenizer, batch

    @property
    def eot_token_id(self) -> int:
        return self.texts.eod

    @property
    def max_length(self) -> int:
        return self.model.max_seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        return self.texts.encode([string])[0]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text. Each token counts once; the last window is extended backwards to full length."""
        of, windows = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for inputs, predicted in get_rolling_token_windows(ids, self.eot_token_id, self.max_length, 1):
                of.append(number)
                windows.append(_window([*inputs, predicted[-1]], len(predicted), self.max_length))
        sums = [0.0] * len(requests)
        for number, (likelihood, _) in zip(of, self._scored(windows), strict=True):
            sums[number] += likelihood
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated text after each context, up to the first stop string of the task.

        Raises ValueError if the task's max_gen_toks leaves no room for a prompt.
        """
        rooms = [self.max_length - _answer_limit(request.args[1], self.max_length) for request in requests]
        prompts = [self.tok_encode(request.args[0]) or [self.eot_token_id] for request in requests]
        if shortened := sum(len(prompt) > room for prompt, room in zip(prompts, rooms, strict=True)):
            message = (
                "warning: %d of %d prompts lose their beginning: max_gen_toks leaves %d of %d positions to a prompt"
            )
            _log.warning(message, shortened, len(requests), min(rooms), self.max_length)
        return [
            self._answer(prompt[-room:], self.max_length - room, request.args[1])
            for prompt, room, request in zip(prompts, rooms, requests, strict=True)
        ]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([_window([*a, *b], len(b), self.max_length) for _, a, b in requests])

    def _scored(self, windows: Iterable[Window]) -> list[tuple[float, bool]]:
        return [(-each.nll, each.greedy) for each in score_all(self.model, windows, self.batch)]

    def _answer(self, prompt: list[int], limit: int, settings: dict[str, Any]) -> str:
        stops = [settings["until"]] if isinstance(settings.get("until"), str) else settings.get("until") or []
        stops = [stop for stop in stops if stop]
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature=temperature, top_p=float(settings.get("top_p", 1.0)))
        ids: list[int] = []
        generated = generate(
            self.model,
            prompt,
            max_tokens=limit,
            sampling=sampling,
            stop=self.eot_token_id,
            vocab_size=self.texts.vocab_size,
        )
        for token in generated:
            ids.append(token)
            text = self.texts.decode(ids)
            if any(stop in text for stop in stops):
                break
        return _before(self.texts.decode(ids), stops)


def run_tasks(answering: Answering, files: Sequence[Path], limit: int | None) -> dict[str, dict[str, Any]]:
    """Run the tasks; returns task -> metrics, with the harness's names. limit: documents per task.

    Raises ValueError for an invalid task file (`check`) and for a task that does not fit its data.
    """
    manager = check(files, answering.max_length)
    try:
        found = simple_evaluate(
            answering,
            tasks=[str(file) for file in files],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    except RuntimeError:  # from the model, such as out of memory
        raise
    except Exception as error:  # from templates and metrics; the harness raises many types
        named = ", ".join(map(str, files))
        raise ValueError(f"{named}: a task does not fit its data: {_one_line(error)}") from error
    return {str(name): _plain(values) for name, values in found["results"].items()}


def check(files: Sequence[Path], max_seq_len: int) -> TaskManager:
    """Load the task files and their data. max_seq_len: of the model.

    Raises ValueError for an invalid task file, and for a task whose max_gen_toks leaves no room for a prompt.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hides a warning for every default value of a task file
    for module, switch in OFFLINE.items():
        setattr(importlib.import_module(module), switch, True)
    manager = TaskManager(include_defaults=False)
    for file in files:
        try:
            tasks = manager.load([str(file)])["tasks"]
        except Exception as error:  # the harness raises many types
            raise ValueError(f"{file} is not a valid task file: {_one_line(error)}") from error
        for name, task in tasks.items():
            if task.config.output_type == "generate_until":
                try:
                    _answer_limit(task.config.generation_kwargs, max_seq_len)
                except ValueError as error:
                    raise ValueError(f"{file}: task {name}: {error}") from error
    return manager


def _answer_limit(settings: dict[str, Any], max_seq_len: int) -> int:
    """The maximum tokens of an answer. Raises ValueError if it leaves no position for the prompt."""
    asked = settings.get("max_gen_toks")
    limit, default = (LONGEST_ANSWER, " (the default)") if asked is None else (asked, "")
    if not (str(limit).isdecimal() and 1 <= int(limit) < max_seq_len):
        raise ValueError(
            f"max_gen_toks {limit}{default} must be a number of at least 1 and below the model's max_seq_len "
            f"{max_seq_len}, which prompt and answer share; set it in generation_kwargs of the task"
        )
    return int(limit)


def _one_line(error: Exception) -> str:
    """Type and message of an error in one line. The message of a KeyError is only the key, so the type is needed."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The metrics with NumPy numbers as floats. A missing standard error is the string N/A."""
    return {key: float(each) if isinstance(each, np.floating) else each for key, each in values.items()}


def _window(tokens: list[int], scored: int, longest: int) -> Window:
    """A window of the last `longest` inputs."""
    last = np.asarray(tokens[-(longest + 1) :], np.int64)
    return Window(last, min(scored, len(last) - 1))


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    places = [text.index(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text
