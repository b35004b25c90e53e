"""The numbers of a study's report.

A cell is one setting of the axes (and fork step) under which arms are compared. Gaps are differences to the baseline in
nats a token on the whole validation split after the last step:

    gap       with the forward pass of each arm's recipe
    weights   with the same weights and a BF16 forward pass: the cost in training
    forward   own forward pass - BF16 forward pass, of the same weights, on the arm's own seeds: the cost of rounding in
              the forward pass. It is gap - weights where all arms have the same seeds.
    tail      on the training batches of the last tenth of the steps, which all arms of a seed share; a cross-check

An arm with an unstable seed has no gap: without that seed, the estimate would be biased. An arm whose loss with a BF16
forward pass is not finite has no gap in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lowprec_train.tools.compare import curves, held_out
from lowprec_train.tools.compare.held_out import HeldOut
from lowprec_train.tools.study.definition import Study
from lowprec_train.tools.study.efficiency import Extra, Law, efficiency, extra_tokens, fit_law
from lowprec_train.tools.study.results import Result, names
from lowprec_train.tools.study.rms_spikes import RmsSpikes, merge_rms_spikes
from lowprec_train.tools.study.statistics import ALPHA, BlockFit, Estimate, Losses, holm, seeds_needed
from lowprec_train.tools.study.sweep import SweepArm, SweepRow, sweep, sweep_arms

RESOLUTION = 0.0015  # of the loss: the half-width of an interval that a study should reach
APART = "no seed in common"
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mean gap to the baseline in percent after a share of the steps."""

    share: float
    percent: float


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """An arm in a cell.

    tokens, parameters: of each run; overrides may change them. predicted, percent: gaps in percent of the baseline's
    loss. speed: tokens/s divided by the baseline's, of runs that did not share a device. extra: see `efficiency`.
    at_loss: speed at the baseline's loss. Other fields: as in `Result`, means or sums over seeds.
    """

    arm: str
    recipe: str
    tokens: int
    parameters: int
    predicted: float | None
    seeds: list[int]
    unstable: dict[int, str]
    loss: float | None
    gap: Estimate | None
    weights: Estimate | None
    forward: Estimate | None
    tail: Estimate | None
    percent: float | None
    words: str
    spread: float | None
    sharpness: float | None
    clipped: float | None
    spikes: int
    rms_spikes: RmsSpikes | None
    skipped: int
    speed: float | None
    extra: Extra | None
    at_loss: float | None
    curve: list[Point]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A contrast that the study names. p: adjusted over all contrasts (Holm)."""

    of: str
    to: str
    cell: str
    difference: Estimate | None
    p: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Difference of two runs of one arm and seed: the noise of the machine."""

    arm: str
    seed: int
    difference: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison.

    s, freedom: pooled residual SD and its degrees of freedom. levene: p of equal noise in all arms. uneven: intervals
    are made from pairs. needed: seeds for a half-width of 0.15 % of the loss. band: SD of the baseline's seeds in
    percent. tokens, parameters, tokens_per_parameter: minimum and maximum over its runs.
    """

    name: str
    tokens: tuple[int, int]
    parameters: tuple[int, int]
    tokens_per_parameter: tuple[float, float]
    arms: list[ArmRow]
    s: float | None
    freedom: int
    levene: float | None
    uneven: bool
    needed: int | None
    band: float | None
    repeats: list[Repeat]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """eff_N and eff_D of an arm under the baseline's scaling law (arXiv 2505.14669)."""

    arm: str
    parameters: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All numbers of a report. law: of the baseline, if it has enough sizes and lengths. left: unfinished runs."""

    name: str
    baseline: str
    corpus_hash: str
    cells: list[Cell]
    gate: list[Cell]
    contrasts: list[Contrast]
    sweep: list[SweepRow]
    sweep_arms: list[SweepArm]
    law: Law | None
    efficiencies: list[Efficiency]
    left: list[str]


def measure(study: Study, found: Sequence[Result], left: Sequence[str]) -> Measured:
    """Compute the numbers of a report. Raises ValueError if no run is finished."""
    if not found:
        raise ValueError(f"study {study.name}: no run is finished, so there is nothing to report")
    by_purpose = {
        purpose: [each for each in found if each.run.purpose == purpose] for purpose in ("gate", "sweep", "estimate")
    }
    estimates = by_purpose["estimate"]
    cells = [cell(study, name, estimates) for name in names(estimates)]
    law = fit_law(points(study.baseline, cells))
    swept = sweep(study, by_purpose["sweep"])
    return Measured(
        name=study.name,
        baseline=study.baseline,
        corpus_hash=str(found[0].facts["corpus_hash"]),
        cells=cells,
        gate=[cell(study, name, by_purpose["gate"]) for name in names(by_purpose["gate"])],
        contrasts=contrasts(study, estimates),
        sweep=swept,
        sweep_arms=sweep_arms(study, swept, by_purpose["sweep"]),
        law=law,
        efficiencies=efficiencies(study, law, cells) if law else [],
        left=list(left),
    )


def points(arm: str, cells: Iterable[Cell]) -> list[tuple[float, float, float]]:
    """Return (parameters, tokens, loss) of an arm in each cell without forks."""
    rows = [row for each in cells for row in each.arms if row.arm == arm and "from step" not in each.name]
    return [(float(row.parameters), float(row.tokens), row.loss) for row in rows if row.loss is not None]


def efficiencies(study: Study, law: Law, cells: Sequence[Cell]) -> list[Efficiency]:
    """Return the efficiencies of every arm, except the baseline, that has enough points."""
    found = {arm: efficiency(law, points(arm, cells)) for arm in study.arms if arm != study.baseline}
    return [Efficiency(arm=arm, parameters=eff[0], tokens=eff[1]) for arm, eff in found.items() if eff]


def losses(found: Iterable[Result], value: str = "loss") -> Losses:
    """Return one value of each run by (arm, seed), without repeats and without arms that have an unstable seed."""
    counted = [each for each in found if not each.run.repeat]
    bad = {each.run.arm for each in counted if each.unstable or not math.isfinite(getattr(each, value))}
    return {(each.run.arm, each.run.seed): getattr(each, value) for each in counted if each.run.arm not in bad}


def cell(study: Study, name: str, among: Sequence[Result]) -> Cell:
    """Compare the finished runs of one cell."""
    mine = [each for each in among if each.run.cell == name]
    fit = BlockFit(losses(mine))
    arms = [arm for arm in study.arms if any(each.run.arm == arm and not each.run.repeat for each in mine)]
    base = fit.mean(study.baseline) if study.baseline in fit.arms else None
    of_base = [value for (arm, _), value in fit.losses.items() if arm == study.baseline]
    spread = float(np.std(of_base, ddof=1)) if fit.freedom and len(of_base) > 1 else None
    return Cell(
        name=name,
        tokens=ends([each.tokens for each in mine]),
        parameters=ends([each.parameters for each in mine]),
        tokens_per_parameter=ends([each.tokens / each.parameters for each in mine]),
        arms=[row(study, arm, fit, mine, among) for arm in arms],
        s=fit.s,
        freedom=fit.freedom,
        levene=fit.levene,
        uneven=fit.uneven,
        needed=seeds_needed(fit.s, fit.freedom, RESOLUTION * base) if fit.s is not None and base else None,
        band=100 * spread / base if spread is not None and base else None,
        repeats=repeats(mine),
    )


def ends(values: Sequence[Number]) -> tuple[Number, Number]:
    """Return minimum and maximum."""
    return min(values), max(values)


def row(study: Study, arm: str, fit: BlockFit, mine: Sequence[Result], among: Sequence[Result]) -> ArmRow:
    own = [each for each in mine if each.run.arm == arm and not each.run.repeat]
    unstable = {each.run.seed: each.unstable for each in own if each.unstable}
    base = study.baseline
    gap = compared(fit, arm, base) if arm != base else None
    percent = 100 * gap.nats / fit.mean(base) if gap else None
    of_base = [each for each in mine if each.run.arm == base and not each.run.repeat]
    speed = speed_ratio(own, of_base)
    extra = extra_tokens(gap, own[0].tokens, token_curve(study, own[0], among)) if gap else None
    return ArmRow(
        arm=arm,
        recipe=study.arms[arm].recipe,
        tokens=own[0].tokens,
        parameters=own[0].parameters,
        predicted=study.arms[arm].predicted,
        seeds=[each.run.seed for each in own],
        unstable=unstable,
        loss=fit.mean(arm) if arm in fit.arms else None,
        gap=gap,
        weights=compared(BlockFit(losses(mine, "weights")), arm, base) if gap else None,
        forward=compared(BlockFit(forward_losses(mine)), arm, base, pairs=True) if gap else None,
        tail=compared(BlockFit(losses(mine, "tail")), arm, base) if gap else None,
        percent=percent,
        words=unstable_words(unstable, len(own)) if unstable else gap_words(fit, arm, base, gap),
        spread=fit.spread(arm) if arm in fit.arms else None,
        sharpness=mean([each.sharpness for each in own]),
        clipped=mean([each.clipped for each in own]),
        spikes=sum(each.spikes for each in own),
        rms_spikes=merge_rms_spikes(each.rms_spikes for each in own),
        skipped=sum(each.skipped for each in own),
        speed=speed,
        extra=extra,
        at_loss=speed / (1 + extra.share) if speed and extra else None,
        curve=gap_curve(own, of_base) if arm != base else [],
    )


def compared(fit: BlockFit, arm: str, other: str, *, pairs: bool = False) -> Estimate | None:
    """Estimate arm - other; None if one of them has no losses or they have no seed in common."""
    if not {arm, other} <= set(fit.arms):
        return None
    try:
        return fit.paired(arm, other) if pairs else fit.compared(arm, other)
    except ValueError:
        return None


def forward_losses(mine: Iterable[Result]) -> Losses:
    """Return, for each run, the loss that rounding in the forward pass adds."""
    own, weights = losses(mine := list(mine)), losses(mine, "weights")
    return {key: own[key] - weights[key] for key in own if key in weights}


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def speed_ratio(own: Sequence[Result], base: Sequence[Result]) -> float | None:
    """Return the ratio of mean rates; None without rates, or if the runs used more than one kind of device."""
    if len({each.facts.get("device") for group in (own, base) for each in group if each.rate}) > 1:
        return None
    rates = [mean([each.rate for each in group]) for group in (own, base)]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def token_curve(study: Study, like: Result, among: Sequence[Result]) -> dict[int, float]:
    """Return tokens -> mean loss of the baseline, from complete runs of each length that differ in `steps` only.

    Lengths without a seed in common, directly or through other lengths, are left out: they would compare seeds. So are
    lengths with an unstable seed.
    """

    def rest(each: Result) -> tuple[object, ...]:
        return (tuple(pair for pair in each.run.setting if pair[0] != "steps"), each.run.fork)

    alike = [
        each for each in among if each.run.arm == study.baseline and not each.run.repeat and rest(each) == rest(like)
    ]
    unstable = {each.tokens for each in alike if each.unstable}
    fit = BlockFit({(str(each.tokens), each.run.seed): each.loss for each in alike if each.tokens not in unstable})
    fit = fit.connected(str(like.tokens))
    return {int(length): fit.mean(length) for length in fit.arms}


def gap_curve(own: Sequence[Result], base: Sequence[Result]) -> list[Point]:
    """Return the mean gap at each evaluation along the run, over the seeds that both have and evaluated alike."""
    reference = {each.run.seed: each for each in base}
    pairs = [
        (each, curves.at_common_steps(each.valid, other.valid))
        for each in own
        if (other := reference.get(each.run.seed)) and same_held_out(each, other)
    ]
    steps = sorted(set.intersection(*(set(common[0].tolist()) for _, common in pairs))) if pairs else []
    points = []
    for step in steps:
        at = [(values[all_steps == step][0], ref[all_steps == step][0]) for _, (all_steps, values, ref) in pairs]
        percent = 100 * float(np.mean([a - b for a, b in at]) / np.mean([b for _, b in at]))
        points.append(Point(share=step / own[0].steps, percent=percent))
    return points


def same_held_out(each: Result, other: Result) -> bool:
    """Return whether two runs were evaluated on the same tokens during training, as far as their results say."""
    return held_out.agree(HeldOut(*one.facts.get("held_out") or (None, None)) for one in (each, other))


def gap_words(fit: BlockFit, arm: str, other: str, gap: Estimate | None) -> str:
    """Return the bound of a gap from one-sided 95 % intervals, in percent of the baseline's mean."""
    if gap is None:
        return APART if arm != other and {arm, other} <= set(fit.arms) else ""
    base = fit.mean(other)
    if gap.at_most is None or gap.at_least is None:
        return "no interval: one seed"
    if gap.at_least > 0:
        return f"gap >= {100 * gap.at_least / base:.2f} %"
    return f"gap <= {100 * gap.at_most / base:.2f} %"


def unstable_words(unstable: dict[int, str], runs: int) -> str:
    reasons = "; ".join(f"seed {seed} {why}" for seed, why in unstable.items())
    return f"unstable ({len(unstable)} of {runs}): {reasons}"


def contrasts(study: Study, estimates: Sequence[Result]) -> list[Contrast]:
    """Estimate the named contrasts in every cell that has both arms, with Holm's correction over all of them."""
    asked: list[tuple[str, str, str, Estimate | None, bool]] = []
    for name in names(estimates):
        fit = BlockFit(losses([each for each in estimates if each.run.cell == name]))
        there = {each.run.arm for each in estimates if each.run.cell == name}
        for of, to in (pair for pair in study.contrasts if set(pair) <= there):
            asked.append((of, to, name, compared(fit, of, to), {of, to} <= set(fit.arms)))
    known = [each[3].p for each in asked if each[3] and each[3].p is not None]
    adjusted = iter(holm([p for p in known if p is not None]))
    found = []
    for of, to, name, difference, stable in asked:
        p = next(adjusted) if difference and difference.p is not None else None
        words = contrast_words(of, to, difference, p) if difference or not stable else APART
        found.append(Contrast(of=of, to=to, cell=name, difference=difference, p=p, words=words))
    return found


def contrast_words(of: str, to: str, difference: Estimate | None, p: float | None) -> str:
    if difference is None:
        return "not compared: an arm is unstable"
    if difference.half is None or p is None:
        return "not resolved: too few seeds for an interval"
    if p >= ALPHA:
        return f"not resolved at +- {difference.half:.4f}"
    return f"{of} {'better' if difference.nats < 0 else 'worse'} than {to}"


def repeats(mine: Sequence[Result]) -> list[Repeat]:
    """Return the differences between repeated runs and the first run of the same arm and seed."""
    first = {(each.run.arm, each.run.seed): each for each in mine if not each.run.repeat}
    second = [each for each in mine if each.run.repeat and (each.run.arm, each.run.seed) in first]
    return [
        Repeat(arm=each.run.arm, seed=each.run.seed, difference=each.loss - other.loss)
        for each in second
        if math.isfinite(each.loss - (other := first[each.run.arm, each.run.seed]).loss)
    ]
