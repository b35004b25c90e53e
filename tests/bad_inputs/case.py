"""One bad input: a command line, the files that it needs, and what its error must say."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SMALL = (
    *("model.layers=1", "model.dim=32", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=384"),
    *("model.max_seq_len=64", "data.seq_len=32", "micro_batch=2", "tokens_per_step=64", "steps=2", "eval_batches=1"),
    *("checkpoint_interval=1", "device=cpu"),
)
ON_SOURCES = (*SMALL, "data=stdlib", "+data.root=corpus", "data.vocab_size=384", "data.cache=cache")
ON_TEXT = (*SMALL, "data=text", "data.vocab_size=384", "data.cache=cache")
ON_SET = (*SMALL, "data=indexed")
WITH = {"train": ON_SOURCES, "train-text": ON_TEXT, "train-set": ON_SET, "train-as-given": ()}


@dataclass(frozen=True)
class Case:
    """command: its first word an entry of WITH, which stands for the run that those settings describe, or `lowprec`.

    says: texts that the error holds, the offending value among them. make: makes files in the directory in which the
    command runs, a copy of the workplace. processes: as torchrun would say to each of so many.
    """

    id: str
    command: str
    says: tuple[str, ...]
    make: Callable[[Path], object] | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def trains(self) -> bool:
        return self.command.split()[0] in WITH

    @property
    def arguments(self) -> list[str]:
        """As the entry point is given them, without its own name."""
        entry, *rest = shlex.split(self.command)
        return [*WITH.get(entry, ()), *rest]


def case(id: str, command: str, *says: str, make: Callable[[Path], object] | None = None, **environment: str) -> Case:
    return Case(id, command, says, make, tuple(environment.items()))
