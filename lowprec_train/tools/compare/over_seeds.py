"""Gaps over seeds: from runs that repeat a configuration with several seeds.

The interval of a single run's gap is valid only for its batches and its seed, and seeds differ by more than most
recipes do. So runs whose configurations differ only in the seed form one arm, and gaps between arms are estimated as in
a study (`tools.study.statistics`). An arm with a diverged run has no gap; of two runs with the same seed the first
counts. Unless two arms have two seeds each, nothing is ranked, and the report says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_train.config import is_launch_fact
from lowprec_train.tools.compare import curves, held_out
from lowprec_train.tools.compare.runs import INCOMPLETE, VALID, Run

OF_SEED = ("seed", "data.seed")
DIVERGED = "diverged"
MISSING = "gaps over seeds need the package 'scipy': pip install 'lowprec_train[study]'"
ONE_SEED = "one seed of each configuration: these gaps hold for this seed only, and nothing is ranked (docs/study.md)"


@dataclass(frozen=True, kw_only=True)
class SeedGap:
    """An arm's gap to the baseline's arm over seeds, with its two-sided 95 % interval.

    words: "above" or "below" the baseline, or that the gap is not resolved.
    """

    arm: str
    seeds: int
    nats: float
    low: float
    high: float
    words: str


@dataclass(frozen=True, kw_only=True)
class OverSeeds:
    """The gaps of all arms. s, freedom: pooled residual SD and its degrees of freedom. note: why gaps are missing or of
    training losses, or "". loss: which loss was compared.
    """

    gaps: list[SeedGap]
    s: float | None
    freedom: int
    loss: str
    note: str


def over_seeds(runs: Sequence[Run], baseline: Run, window: int) -> OverSeeds:
    """Return the gaps to the baseline's arm."""
    arms = arms_of(runs)
    repeated = [arm for arm in set(arms.values()) if list(arms.values()).count(arm) > 1]
    if len(repeated) < 2:
        return OverSeeds(gaps=[], s=None, freedom=0, loss="", note=ONE_SEED)
    if importlib.util.find_spec("scipy") is None:
        return OverSeeds(gaps=[], s=None, freedom=0, loss="", note=MISSING)
    return _estimated(runs, arms, arms[baseline.label], window)


def _estimated(runs: Sequence[Run], arms: Mapping[str, str], base: str, window: int) -> OverSeeds:
    from lowprec_train.tools.study.statistics import BlockFit

    values, what, why = final_losses([run for run in runs if run.status not in (DIVERGED, INCOMPLETE)], window)
    unfit = {arms[run.label] for run in runs if not np.isfinite(values.get(run.label, np.nan))}
    losses: dict[tuple[str, int], float] = {}
    for run in (each for each in runs if arms[each.label] not in unfit and "seed" in each.config):
        losses.setdefault((arms[run.label], int(run.config["seed"])), values[run.label])
    fit = BlockFit(losses)
    note = (
        f"diverged, incomplete or not finite on a seed, so without a gap: {', '.join(sorted(unfit))}" if unfit else ""
    )
    if base not in fit.arms:
        return OverSeeds(gaps=[], s=None, freedom=0, loss=what, note=note or ONE_SEED)
    gaps = []
    for arm in (arm for arm in fit.arms if arm != base):
        try:
            found = fit.compared(arm, base)
        except ValueError as error:
            note = note or str(error)
            continue
        if found.half is None or found.low is None or found.high is None:
            note = note or ONE_SEED
            continue
        apart = found.low > 0 or found.high < 0
        words = ("above" if found.nats > 0 else "below") if apart else f"not resolved at ± {found.half:.4f}"
        seeds = sum(name == arm for name, _ in fit.losses)
        gaps.append(SeedGap(arm=arm, seeds=seeds, nats=found.nats, low=found.low, high=found.high, words=words))
    note = "; ".join(filter(None, (note, why if gaps else "")))
    return OverSeeds(gaps=gaps, s=fit.s, freedom=fit.freedom, loss=what, note=note)


def arms_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the arm of each run, by labels. Runs of an arm differ in no training key except the seed. An arm is named
    after its recipe if that is unique, else after its first run.
    """
    keys = {run.label: training(run) for run in runs}
    first = {key: next(run for run in runs if keys[run.label] == key) for key in keys.values()}
    recipes = [run.recipe for run in first.values()]
    return {
        label: first[key].recipe if recipes.count(first[key].recipe) == 1 else first[key].label
        for label, key in keys.items()
    }


def training(run: Run) -> Hashable:
    """Return the training configuration of a run without the seed."""
    return tuple(sorted((k, str(v)) for k, v in run.config.items() if k not in OF_SEED and not is_launch_fact(k)))


def final_losses(runs: Sequence[Run], window: int) -> tuple[dict[str, float], str, str]:
    """Return the held-out loss of each run at the last step that all evaluated, on the same tokens, else the mean of
    its last training losses; which of both; and why not held-out losses, or "".
    """
    common = set.intersection(*(set(run.series(VALID).steps.tolist()) for run in runs)) if runs else set()
    if common and held_out.same_tokens(runs):
        at = max(common)
        valid = {run.label: run.series(VALID) for run in runs}
        losses = {label: float(each.values[each.steps == at][0]) for label, each in valid.items()}
        return losses, f"validation, step {at}", ""
    amounts = held_out.all_amounts(runs) if common else ""
    why = f"the runs were evaluated on {amounts}, so these gaps are of training losses" if common else ""
    return {run.label: curves.interval(run.loss.values[-window:]).mean for run in runs}, "training", why
