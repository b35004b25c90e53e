"""Tasks of lm-evaluation-harness, answered by a model of ours under any recipe; needs the package `lm_eval`.

The harness asks three things of a model: how likely a continuation is after a context, how likely a text is, and what
it would write. Text becomes tokens as in the harness's own adapter of Hugging Face models, so an exported model gets
the same requests there: a context is not closed or begun by a special token, an empty one is the end-of-document token,
and what is too long loses its beginning.

Task files are YAML; they and the data that they name are local. Nothing is looked up by name or downloaded: the
libraries that could are told to stay offline, whatever the environment says.
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

LONGEST_ANSWER = 256  # tokens, where a task does not say
# Modules that hold the switch HF_..._OFFLINE of a library, read when it is used.
OFFLINE = {
    "huggingface_hub.constants": "HF_HUB_OFFLINE",
    "datasets.config": "HF_HUB_OFFLINE",
    "evaluate.config": "HF_EVALUATE_OFFLINE",
}
RESAMPLES = 1000  # for the standard errors of metrics that have no formula


class Answering(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """The harness's view of a model and its tokenizer. batch: requests of equal length that are computed together."""

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
        """Log-probability of each text: every token once, the last window of a text full."""
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
        """What the model writes after each context, up to the first of the task's stopping strings."""
        return [self._answer(*request.args) for request in requests]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([_window([*a, *b], len(b), self.max_length) for _, a, b in requests])

    def _scored(self, windows: Iterable[Window]) -> list[tuple[float, bool]]:
        return [(-each.nll, each.greedy) for each in score_all(self.model, windows, self.batch)]

    def _answer(self, context: str, asked: dict[str, Any]) -> str:
        stops = [asked["until"]] if isinstance(asked.get("until"), str) else list(asked.get("until") or [])
        room = min(int(asked.get("max_gen_toks", LONGEST_ANSWER)), self.max_length - 1)
        prompt = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - room) :]
        warm = float(asked.get("temperature", 1.0)) if asked.get("do_sample") else 0.0
        sampling = Sampling(temperature=warm, top_p=float(asked.get("top_p", 1.0)))
        ids: list[int] = []
        for token in generate(self.model, prompt, max_tokens=room, sampling=sampling, stop=self.eot_token_id):
            ids.append(token)
            text = self.texts.decode(ids)
            if any(stop in text for stop in stops):
                break
        return _before(self.texts.decode(ids), stops)


def run_tasks(answering: Answering, files: Sequence[Path], limit: int | None) -> dict[str, dict[str, Any]]:
    """Metrics by task, as the harness names them. limit: documents of each task.

    Raises ValueError for what `check` finds, and for a task that does not fit its data.
    """
    manager = check(files)
    try:
        found = simple_evaluate(
            answering,
            tasks=[str(file) for file in files],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    except RuntimeError:  # of the model: out of memory
        raise
    except Exception as error:  # as below; of templates and metrics
        named = ", ".join(map(str, files))
        raise ValueError(f"{named}: a task does not fit its data: {_told(error)}") from error
    return {str(name): _plain(values) for name, values in found["results"].items()}


def check(files: Sequence[Path]) -> TaskManager:
    """Read the task files and the data that they name. Raises ValueError for one that describes no task that can
    be run.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every default that a task file relies on
    for module, switch in OFFLINE.items():
        setattr(importlib.import_module(module), switch, True)
    manager = TaskManager(include_defaults=False)
    for file in files:
        try:
            manager.load([str(file)])
        except Exception as error:  # the harness raises whatever it meets
            raise ValueError(f"{file} describes no task that can be run: {_told(error)}") from error
    return manager


def _told(error: Exception) -> str:
    """An error in one line, with its type: the message of a KeyError is the key alone."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers and strings; the harness writes N/A where it has no standard error."""
    return {key: float(each) if isinstance(each, np.floating) else each for key, each in values.items()}


def _window(tokens: list[int], scored: int, longest: int) -> Window:
    kept = np.asarray(tokens[-(longest + 1) :], np.int64)
    return Window(kept, min(scored, len(kept) - 1))


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stopping strings."""
    places = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text
