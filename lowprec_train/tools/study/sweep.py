"""A sweep: which value of a setting is best for each arm, and which ones work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowprec_train.tools.study.definition import Study
from lowprec_train.tools.study.results import Result, names

WORKABLE = 1.02  # times the loss of an arm's best value, up to which a value works


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """An arm under one setting of a sweep: its mean loss, and whether it works there. axis, value: of a setting that is
    one number; else "" and None.
    """

    arm: str
    setting: str
    axis: str
    value: float | None
    seeds: list[int]
    unstable: dict[int, str]
    loss: float | None
    best: bool
    works: bool


def sweep(study: Study, found: Sequence[Result]) -> list[SweepRow]:
    """Mean losses of the sweep's runs, and the values that work: stable, and near the best one's loss."""
    rows: list[SweepRow] = []
    for arm in study.arms:
        mine = [each for each in found if each.run.arm == arm and not each.run.repeat]
        groups = {name: [each for each in mine if each.run.cell == name] for name in names(mine)}
        stable = {
            name: float(np.mean([each.loss for each in group]))
            for name, group in groups.items()
            if not any(each.unstable for each in group)
        }
        best = min(stable, key=lambda name: stable[name], default=None)
        for name, group in groups.items():
            axis, value = number_of(group[0].run.setting)
            rows.append(
                SweepRow(
                    arm=arm,
                    setting=name,
                    axis=axis,
                    value=value,
                    seeds=[each.run.seed for each in group],
                    unstable={each.run.seed: each.unstable for each in group if each.unstable},
                    loss=stable.get(name),
                    best=name == best,
                    works=name in stable and best is not None and stable[name] <= WORKABLE * stable[best],
                )
            )
    return rows


def number_of(setting: Sequence[tuple[str, object]]) -> tuple[str, float | None]:
    """The axis and the value of a setting that is one number."""
    if len(setting) == 1 and type(setting[0][1]) in (int, float):
        return setting[0][0], float(str(setting[0][1]))
    return "", None
