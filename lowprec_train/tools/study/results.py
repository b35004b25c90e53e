"""Results of the runs of a study: losses, stability and speed, read from the run directories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.tools.compare import curves, held_out
from lowprec_train.tools.compare.measure import RATE, SKIPPED
from lowprec_train.tools.compare.runs import INCOMPLETE, VALID, Array, Run, Series, read_info, read_run
from lowprec_train.tools.study import evaluation, forking
from lowprec_train.tools.study.plan import StudyRun, check_same
from lowprec_train.tools.study.progress import shared, state
from lowprec_train.tools.study.rms_spikes import RmsSpikes, rms_spikes
from lowprec_train.train.trained import OF_RUN, UNQUANTISED

NORM = "train/grad_norm"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one finished run.

    loss, weights: validation loss in nats a token on the whole split, with the recipe's forward pass and with a BF16
    forward pass. tail: mean training loss of the last tenth of the steps. start: first training loss. Both are NaN if
    no loss was logged. sharpness: with the recipe's forward pass; None if not measured. unstable: the reason, "" for a
    stable run. logged: number of logged training losses. clipped: share of steps; spikes, skipped: counts; of a fork,
    all after the fork. valid: during training. facts: of run.json, and `held_out`: number and length of sequences of
    `valid`. rate: tokens/s; None if the run shared its device. steps: planned, also of a diverged run. parameters:
    without embedding and head. start_state: content of fork.json; empty if the run is not a fork.
    """

    run: StudyRun
    loss: float
    weights: float
    tail: float
    start: float
    sharpness: float | None
    unstable: str
    logged: int
    clipped: float | None
    spikes: int
    rms_spikes: RmsSpikes | None
    skipped: int
    rate: float | None
    steps: int
    tokens: int
    parameters: int
    valid: Series
    facts: Mapping[str, Any]
    start_state: Mapping[str, Any]


def read(planned: Sequence[StudyRun], out: Path, stored: Sequence[Result] = ()) -> tuple[list[Result], list[str]]:
    """Results of all finished runs, in `out` or `stored`, in the order of the plan, and the names of unfinished runs.

    Raises ValueError if runs used different corpora, if a configuration differs from the plan, if forks of one run
    started from different states, or if a run is in `out` and in `stored` with different losses.
    """
    finished = [run for run in planned if state(out / run.name).finished]
    check_same(finished, out)
    slowed = shared(out)
    found = [result(run, out / run.name) for run in finished]
    found = mark_unstable(
        merge([replace(each, rate=None) if each.run.name in slowed else each for each in found], stored)
    )
    for each in found:
        corpus, first = (one.facts["corpus_hash"] for one in (each, found[0]))
        if corpus != first:
            raise ValueError(f"{each.run.name} has corpus hash {corpus}, and {found[0].run.name} has {first}")
        if each.run.trunk and not each.start_state:
            raise ValueError(f"{each.run.name}: the state from which it was forked is not known; train the run again")
    forking.check_start({each.run.name: each.start_state for each in found})
    known = {each.run.name: each for each in found}
    return [known[run.name] for run in planned if run.name in known], [
        run.name for run in planned if run.name not in known
    ]


def merge(of_folder: Sequence[Result], stored: Sequence[Result]) -> list[Result]:
    """Merge the runs of the folder and stored runs. Raises ValueError if a run is in both with different losses."""
    found = {each.run.name: each for each in stored}
    for each in of_folder:
        other = found.get(each.run.name, each)
        if other.loss != each.loss and not (math.isnan(other.loss) and math.isnan(each.loss)):
            raise ValueError(
                f"{each.run.name}: the stored loss is {other.loss}, that of the folder is {each.loss}: "
                "give another --out or leave out the file"
            )
        found[each.run.name] = each
    return list(found.values())


def names(found: Iterable[Result]) -> list[str]:
    """Return the names of the cells, in the order of the plan."""
    return list(dict.fromkeys(each.run.cell for each in found))


def result(run: StudyRun, directory: Path) -> Result:
    """Read the result of one run. Raises ValueError for a file that cannot be read."""
    facts = read_info(directory)
    record = read_run(directory, facts, run.name)
    if record.status == INCOMPLETE:
        raise ValueError(f"{directory}: {record.notes[-1]}; restore the file, or delete the run to train it again")
    evaluated = evaluation.read(directory)
    losses, sharp = evaluated.get("loss") or {}, (evaluated.get("sharpness") or {}).get(OF_RUN)
    loss, weights = (float(losses.get(forward, math.nan)) for forward in (OF_RUN, UNQUANTISED))
    start = run.fork.step if run.fork and run.trunk else 0
    after_fork, before_fork = (part(record, ends) for ends in ((start, math.inf), (0, start)))
    spikes = [each for each in curves.spikes(record.loss) if each.step in after_fork.loss.steps]
    rate = record.series(RATE).values
    return Result(
        run=run,
        loss=loss,
        weights=weights,
        tail=tail(record.loss.values),
        start=float(record.loss.values[0]) if len(record.loss.values) else math.nan,
        sharpness=None if sharp is None else float(sharp),
        unstable=unstable(record, loss),
        logged=len(record.loss.steps),
        clipped=clipped(after_fork),
        spikes=len(spikes),
        rms_spikes=rms_spikes(after_fork, spikes),
        skipped=skipped(after_fork) - skipped(before_fork),
        rate=float(np.median(rate)) if len(rate) else None,
        steps=int(record.config["steps"]),
        tokens=int(record.config["steps"]) * int(record.config["tokens_per_step"]),
        parameters=parameters(facts, record.config),
        valid=record.series(VALID),
        facts=facts | {"held_out": [*astuple(held_out.of_run(record))]},
        start_state=forking.start_state(directory),
    )


def part(record: Run, ends: tuple[float, float]) -> Run:
    """Return the run with only the metrics of steps in (ends[0], ends[1]]."""

    def within(each: Series) -> Series:
        kept = (each.steps > ends[0]) & (each.steps <= ends[1])
        return Series(steps=each.steps[kept], values=each.values[kept])

    return replace(record, metrics={name: within(each) for name, each in record.metrics.items()})


def skipped(record: Run) -> int:
    """Return the number of skipped steps."""
    values = record.series(SKIPPED).values
    return int(np.max(values)) if len(values) else 0


def tail(losses: Array) -> float:
    """Return the mean of the last tenth of the losses, without non-finite losses: those steps were skipped."""
    last = losses[-max(1, len(losses) // 10) :]
    counted = last[np.isfinite(last)]
    return float(np.mean(counted)) if len(counted) else math.nan


def unstable(record: Run, loss: float) -> str:
    """Return why a finished run is unstable; "" for a stable run."""
    if record.status == "diverged":
        steps = record.loss.steps
        return f"diverged at step {int(steps[-1])}" if len(steps) else "diverged before a loss was logged"
    return "" if math.isfinite(loss) else f"validation loss {loss}"


def mark_unstable(found: Sequence[Result]) -> list[Result]:
    """Mark runs as unstable that end above the unigram entropy while others of the same size and length end below."""

    def above(each: Result) -> bool:
        entropy = each.facts.get("valid_unigram_entropy")
        return entropy is not None and each.loss > entropy

    learned = {(each.tokens, each.parameters) for each in found if not each.unstable and not above(each)}
    return [
        replace(each, unstable=f"ends at {each.loss:.2f}, above the unigram entropy")
        if not each.unstable and above(each) and (each.tokens, each.parameters) in learned
        else each
        for each in found
    ]


def clipped(record: Run) -> float | None:
    """Return the share of logged steps with a gradient norm above `max_grad_norm`; None without clipping."""
    limit, norms = float(record.config.get("max_grad_norm", 0)), record.series(NORM).values
    return float(np.mean(norms > limit)) if limit and len(norms) else None


def parameters(facts: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the number of parameters without embedding and head, as scaling laws count them."""
    table = int(config["model.vocab_size"]) * int(config["model.dim"])
    return int(facts["parameters"]) - table * (1 if config["model.tied"] else 2)
