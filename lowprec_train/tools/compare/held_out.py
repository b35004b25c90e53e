"""Which held-out tokens a run evaluates during training, and whether runs evaluate the same ones.

The trainer evaluates the first `eval_batches` * `micro_batch` sequences of the validation split, in an order that
depends only on the split and on `data.seq_len`. So runs on one corpus evaluate the same tokens if they agree in the
number of sequences and in their length. Otherwise a difference of held-out losses is partly one of text, and nothing
may be concluded from it. `eval_batches` is a launch setting: a configuration is the one of a run's last launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from lowprec_train.tools.compare.runs import VALID, Run


@dataclass(frozen=True)
class HeldOut:
    """The number and the length of the sequences that a run evaluates; None: its configuration does not say."""

    sequences: int | None
    seq_len: int | None


def of_run(run: Run) -> HeldOut:
    """Return what a run evaluates, from its configuration."""
    batches, micro_batch, seq_len = (_number(run, key) for key in ("eval_batches", "micro_batch", "data.seq_len"))
    return HeldOut(None if batches is None or micro_batch is None else batches * micro_batch, seq_len)


def _number(run: Run, key: str) -> int | None:
    value = run.config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def same_tokens(runs: Iterable[Run]) -> bool:
    """Return whether all runs evaluate the same tokens, as far as their configurations say."""
    return agree(map(of_run, runs))


def agree(evaluated: Iterable[HeldOut]) -> bool:
    """Return whether these are the same tokens, as far as is known."""
    return all(len(set(values) - {None}) < 2 for values in zip(*map(astuple, evaluated), strict=True))


def notes(runs: Sequence[Run], baseline: Run) -> list[str]:
    """Return why held-out losses are not compared: a sentence for all runs that evaluate the same, other tokens than
    the baseline.
    """
    others: dict[HeldOut, list[Run]] = {}
    for run in (run for run in runs if all(len(each.series(VALID).steps) for each in (run, baseline))):
        if not same_tokens((run, baseline)):
            others.setdefault(of_run(run), []).append(run)
    sentences = []
    for alike in others.values():
        own, base = amounts((alike[0], baseline))
        were = f"{listed([run.label for run in alike])} {'was' if len(alike) == 1 else 'were'}"
        base = base.removesuffix(" sequences")
        sentences.append(f"{were} evaluated on {own}, the baseline on {base}: held-out losses are not compared")
    return sentences


def amounts(runs: Iterable[Run]) -> list[str]:
    """Return the different amounts that runs evaluate: `64 sequences`, or `64 sequences of 256 tokens` if the lengths
    differ. A run whose configuration does not say it has none.
    """
    evaluated = [of_run(run) for run in runs]
    differ = len({each.seq_len for each in evaluated} - {None}) > 1
    found = []
    for each in evaluated:
        count = [] if each.sequences is None else [str(each.sequences)]
        length = [f"of {each.seq_len} tokens"] if differ and each.seq_len is not None else []
        if count or length:
            found.append(" ".join([*count, "sequence" if each.sequences == 1 else "sequences", *length]))
    return list(dict.fromkeys(found))


def all_amounts(runs: Iterable[Run]) -> str:
    """Return all amounts that runs evaluate: `32 and 64 sequences`."""
    *others, last = amounts(runs)
    return listed([*(each.removesuffix(" sequences") for each in others), last])


def listed(names: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
