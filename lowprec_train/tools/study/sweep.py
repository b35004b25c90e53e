"""A sweep over a setting: the best value of each arm, the values that work, and the gap at the best values.

A value works if no seed is unstable and the mean loss is within 2 % of the arm's best mean loss. The sensitivity of an
arm to the value (arXiv 2309.14322) is the mean over values and seeds of min(loss, initial loss), minus the loss of the
best value; a diverged run counts with its initial loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_train.tools.study.definition import Study
from lowprec_train.tools.study.results import Result, names
from lowprec_train.tools.study.rms_spikes import RmsSpikes, merge_rms_spikes
from lowprec_train.tools.study.statistics import BlockFit, Estimate

WORKABLE = 1.02  # a value works up to this multiple of the arm's best loss


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """An arm at one setting of a sweep.

    axis, value: if the setting is one number; otherwise "" and None. loss: mean over seeds; None if a seed is unstable.
    spread: SD over seeds; None for one seed. losses: finite losses by seed, of unstable runs too. sharpness: mean over
    the runs that have one.
    """

    arm: str
    setting: str
    axis: str
    value: float | None
    seeds: list[int]
    unstable: dict[int, str]
    losses: dict[int, float]
    sharpness: float | None
    rms_spikes: RmsSpikes | None
    loss: float | None
    spread: float | None
    best: bool
    works: bool


@dataclass(frozen=True, kw_only=True)
class SweepArm:
    """An arm over all settings.

    own: gap to the baseline, each at its own best value. common: gap with both at the baseline's best value. Both are
    from the seeds that both have; None if there are none or a seed is unstable. edge: "lowest" or "highest" if the best
    value is the lowest or highest that was tried, so that a better one may lie beyond; otherwise "".
    """

    arm: str
    best: str | None
    edge: str
    loss: float | None
    works: list[str]
    own: Estimate | None
    common: Estimate | None
    sensitivity: float | None


def sweep(study: Study, found: Sequence[Result]) -> list[SweepRow]:
    """Return a row for each arm and setting with a finished run, sorted by value."""
    counted = [each for each in found if not each.run.repeat]
    return [row for arm in study.arms for row in _rows([each for each in counted if each.run.arm == arm])]


def _rows(mine: Sequence[Result]) -> list[SweepRow]:
    groups = {name: [each for each in mine if each.run.cell == name] for name in names(mine)}
    stable = {name: group for name, group in groups.items() if not any(each.unstable for each in group)}
    fit = BlockFit({(name, each.run.seed): each.loss for name, group in stable.items() for each in group})
    means = {name: fit.mean(name) for name in stable}
    best = min(means, key=lambda name: means[name], default=None)
    rows = [
        _row(group, means.get(name), best=name == best, limit=WORKABLE * means[best] if best is not None else math.nan)
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -math.inf if row.value is None else row.value)


def _row(group: Sequence[Result], loss: float | None, *, best: bool, limit: float) -> SweepRow:
    run = group[0].run
    axis, value = number_of(run.setting)
    losses = {each.run.seed: each.loss for each in group if math.isfinite(each.loss)}
    return SweepRow(
        arm=run.arm,
        setting=run.cell,
        axis=axis,
        value=value,
        seeds=[each.run.seed for each in group],
        unstable={each.run.seed: each.unstable for each in group if each.unstable},
        losses=losses,
        sharpness=float(np.mean(sharp)) if (sharp := [e.sharpness for e in group if e.sharpness is not None]) else None,
        rms_spikes=merge_rms_spikes(each.rms_spikes for each in group),
        loss=loss,
        spread=float(np.std(list(losses.values()), ddof=1)) if loss is not None and len(losses) > 1 else None,
        best=best,
        works=loss is not None and loss <= limit,
    )


def number_of(setting: Sequence[tuple[str, object]]) -> tuple[str, float | None]:
    """Return axis and value of a setting that is one number; otherwise "" and None."""
    if len(setting) == 1 and type(setting[0][1]) in (int, float):
        return setting[0][0], float(str(setting[0][1]))
    return "", None


def sweep_arms(study: Study, rows: Sequence[SweepRow], found: Sequence[Result]) -> list[SweepArm]:
    """Summarise the settings of each arm."""
    table = {(row.arm, row.setting): row for row in rows}
    best = {row.arm: row for row in rows if row.best}
    base = best.get(study.baseline)
    made = []
    for arm in (each for each in study.arms if any(row.arm == each for row in rows)):
        own = best.get(arm)
        common = table.get((arm, base.setting)) if base else None
        mine = [each for each in found if each.run.arm == arm and not each.run.repeat]
        made.append(
            SweepArm(
                arm=arm,
                best=own.setting if own else None,
                edge=_edge(own, [row.value for row in rows if row.arm == arm and row.value is not None]),
                loss=own.loss if own else None,
                works=[row.setting for row in rows if row.arm == arm and row.works],
                own=_gap(own, base),
                common=_gap(common, base),
                sensitivity=_sensitivity(mine, own.loss) if own and own.loss is not None else None,
            )
        )
    return made


def _edge(best: SweepRow | None, tried: Sequence[float]) -> str:
    if best is None or best.value is None or len(tried) < 2:
        return ""
    return {min(tried): "lowest", max(tried): "highest"}.get(best.value, "")


def _gap(row: SweepRow | None, base: SweepRow | None) -> Estimate | None:
    """Estimate the difference of two stable settings from pairs of seeds; None for the baseline itself."""
    if row is None or base is None or row is base or row.loss is None or not set(row.losses) & set(base.losses):
        return None
    losses = {(side, seed): loss for side, of in (("arm", row), ("base", base)) for seed, loss in of.losses.items()}
    return BlockFit(losses).paired("arm", "base")


def _sensitivity(mine: Sequence[Result], best: float) -> float | None:
    """Return the sensitivity; None if a diverged run has logged no loss."""
    ends = [min(each.loss if math.isfinite(each.loss) else math.inf, each.start) for each in mine]
    return float(np.mean(ends)) - best if all(map(math.isfinite, ends)) else None
