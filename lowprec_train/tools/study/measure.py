"""The numbers of a study's report, as values that are written to JSON.

A cell is a setting (the values of the axes, and where runs begin) under which arms are compared. Gaps are differences
to the baseline, in nats a token on the whole validation split after the last step:

    gap       with each arm's own forward pass
    weights   the same weights with a forward pass in BF16: what training has lost
    forward   gap - weights: the rounding of the forward pass that still goes on
    tail      on the batches of the last tenth of the steps: a check, as arms of a seed share them

An arm with an unstable seed has no gap: leaving that seed out would judge the arm by its luck. One whose forward pass
in BF16 is not finite has no gap in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from lowprec_train.tools.compare import curves
from lowprec_train.tools.study.definition import Study
from lowprec_train.tools.study.efficiency import Extra, Law, efficiency, extra_tokens, fit_law
from lowprec_train.tools.study.results import Result, names
from lowprec_train.tools.study.rms_spikes import RmsSpikes, together
from lowprec_train.tools.study.statistics import ALPHA, BlockFit, Estimate, Losses, holm, seeds_needed
from lowprec_train.tools.study.sweep import SweepArm, SweepRow, sweep, sweep_arms

RESOLUTION = 0.0015  # of the loss: the half-width that a study should reach
APART = "no seed in common"
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mean gap to the baseline in percent at a share of the run."""

    share: float
    percent: float


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """An arm in a cell. Shares and counts are of its runs; speed is tokens a second over the baseline's, where runs had
    a device to themselves. predicted, percent: gaps in percent of the baseline's loss.

    extra: tokens by which the baseline's run could be shorter for this loss; at_loss: speed at the baseline's loss.
    tokens, parameters: of each run; arms may differ in them by their overrides.
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
    """A question that was asked beforehand. p: adjusted over all of them (Holm)."""

    of: str
    to: str
    cell: str
    difference: Estimate | None
    p: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Two runs of one arm and seed: the noise of the machine."""

    arm: str
    seed: int
    difference: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison. s, freedom: pooled residual SD; levene: p of equal noise; uneven: intervals are from pairs.

    needed: seeds for a half-width of 0.15 % of the loss. band: SD of the baseline's seeds in percent. tokens,
    parameters, tokens_per_parameter: the fewest and the most of its runs.
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
    """What an arm's arithmetic makes of parameters and of tokens, under the baseline's scaling law."""

    arm: str
    parameters: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A whole study. law: of the baseline, where it has enough sizes and lengths."""

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
    """ValueError where no run is finished."""
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
    """(parameters, tokens, loss) of an arm in each cell of whole runs."""
    rows = [row for each in cells for row in each.arms if row.arm == arm and "from step" not in each.name]
    return [(float(row.parameters), float(row.tokens), row.loss) for row in rows if row.loss is not None]


def efficiencies(study: Study, law: Law, cells: Sequence[Cell]) -> list[Efficiency]:
    """Of every arm but the baseline that has points enough."""
    found = {arm: efficiency(law, points(arm, cells)) for arm in study.arms if arm != study.baseline}
    return [Efficiency(arm=arm, parameters=eff[0], tokens=eff[1]) for arm, eff in found.items() if eff]


def losses(found: Iterable[Result], value: str = "loss") -> Losses:
    """What a fit takes: of arms whose seeds are all stable and have this value, without repeats."""
    counted = [each for each in found if not each.run.repeat]
    bad = {each.run.arm for each in counted if each.unstable or not math.isfinite(getattr(each, value))}
    return {(each.run.arm, each.run.seed): getattr(each, value) for each in counted if each.run.arm not in bad}


def cell(study: Study, name: str, among: Sequence[Result]) -> Cell:
    """One comparison of what is finished."""
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
    """The least and the greatest."""
    return min(values), max(values)


def row(study: Study, arm: str, fit: BlockFit, mine: Sequence[Result], among: Sequence[Result]) -> ArmRow:
    own = [each for each in mine if each.run.arm == arm and not each.run.repeat]
    unstable = {each.run.seed: each.unstable for each in own if each.unstable}
    base = study.baseline
    gap = compared(fit, arm, base) if arm != base else None
    percent = 100 * gap.nats / fit.mean(base) if gap else None
    speed = speed_ratio(own, [each for each in mine if each.run.arm == base])
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
        rms_spikes=together(each.rms_spikes for each in own),
        skipped=sum(each.skipped for each in own),
        speed=speed,
        extra=extra,
        at_loss=speed / (1 + extra.share) if speed and extra else None,
        curve=gap_curve(own, [each for each in mine if each.run.arm == base]) if arm != base else [],
    )


def compared(fit: BlockFit, arm: str, other: str, *, pairs: bool = False) -> Estimate | None:
    """arm - other; None where one of them has no number, or they have no seed in common."""
    if not {arm, other} <= set(fit.arms):
        return None
    try:
        return fit.paired(arm, other) if pairs else fit.compared(arm, other)
    except ValueError:
        return None


def forward_losses(mine: Iterable[Result]) -> Losses:
    """What the forward pass's rounding adds to each run's loss."""
    own, weights = losses(mine := list(mine)), losses(mine, "weights")
    return {key: own[key] - weights[key] for key in own if key in weights}


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def speed_ratio(own: Sequence[Result], base: Sequence[Result]) -> float | None:
    rates = [mean([each.rate for each in group]) for group in (own, base)]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def token_curve(study: Study, like: Result, among: Sequence[Result]) -> dict[int, float]:
    """Tokens -> the baseline's mean loss, of runs of that length alone: those that differ in `steps` only.

    Lengths that no chain of seeds connects to this one are left out: their difference would be one of seeds.
    """

    def rest(each: Result) -> tuple[object, ...]:
        return (tuple(pair for pair in each.run.setting if pair[0] != "steps"), each.run.fork)

    alike = [
        each
        for each in among
        if each.run.arm == study.baseline and not each.run.repeat and not each.unstable and rest(each) == rest(like)
    ]
    fit = BlockFit({(str(each.tokens), each.run.seed): each.loss for each in alike})
    fit = fit.connected(str(like.tokens))
    return {int(length): fit.mean(length) for length in fit.arms}


def gap_curve(own: Sequence[Result], base: Sequence[Result]) -> list[Point]:
    """Mean gap on the batches of the evaluations along the run, over the seeds that both have."""
    reference = {each.run.seed: each.valid for each in base if not each.run.repeat}
    pairs = [
        (each, curves.at_common_steps(each.valid, reference[each.run.seed]))
        for each in own
        if each.run.seed in reference
    ]
    steps = sorted(set.intersection(*(set(common[0].tolist()) for _, common in pairs))) if pairs else []
    points = []
    for step in steps:
        at = [(values[all_steps == step][0], ref[all_steps == step][0]) for _, (all_steps, values, ref) in pairs]
        percent = 100 * float(np.mean([a - b for a, b in at]) / np.mean([b for _, b in at]))
        points.append(Point(share=step / own[0].steps, percent=percent))
    return points


def gap_words(fit: BlockFit, arm: str, other: str, gap: Estimate | None) -> str:
    """What may be said of a gap: the ends of one-sided 95 % intervals, in percent of the baseline's mean."""
    if gap is None:
        return APART if arm != other and {arm, other} <= set(fit.arms) else ""
    base = fit.mean(other)
    if gap.at_most is None or gap.at_least is None:
        return "no interval: one seed"
    if gap.at_least > 0:
        return f"gap >= {100 * gap.at_least / base:.2f} %"
    return f"gap <= {100 * gap.at_most / base:.2f} %"


def unstable_words(unstable: dict[int, str], runs: int) -> str:
    told = "; ".join(f"seed {seed} {why}" for seed, why in unstable.items())
    return f"unstable ({len(unstable)} of {runs}): {told}"


def contrasts(study: Study, estimates: Sequence[Result]) -> list[Contrast]:
    """The named contrasts in every cell that has both arms; Holm over all of them."""
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
    """Second runs of an arm and seed against the first."""
    first = {(each.run.arm, each.run.seed): each for each in mine if not each.run.repeat}
    second = [each for each in mine if each.run.repeat and (each.run.arm, each.run.seed) in first]
    return [
        Repeat(arm=each.run.arm, seed=each.run.seed, difference=each.loss - other.loss)
        for each in second
        if math.isfinite(each.loss - (other := first[each.run.arm, each.run.seed]).loss)
    ]
