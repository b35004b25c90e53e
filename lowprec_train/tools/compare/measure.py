"""Measure a comparison: gaps, speed and memory, as values that are written to JSON unchanged.

The gap of a run is the mean of (its loss - the baseline's loss) over the last matched points. Matched *steps* compare
the same batches; matched *tokens* are fair also for different batch sizes. Speed alone favours a recipe that learns
less per token, so the time to the same loss is measured too: to the worse of the two final losses, which both reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowprec_train.config import is_launch_fact
from lowprec_train.tools.compare import curves, held_out
from lowprec_train.tools.compare.curves import Interval, Spike
from lowprec_train.tools.compare.over_seeds import OverSeeds, over_seeds
from lowprec_train.tools.compare.runs import INCOMPLETE, LOSS, TOKENS, VALID, Array, Run, Series

RATE = "perf/tokens_per_sec_per_gpu"
MEMORY = "mem/peak_gib"
SKIPPED = "train/skipped"
WINDOW_RANGE = (30, 200)  # limits of the window, a tenth of the run, in steps
CURVE_POINTS = 500
REPORTED_ELSEWHERE = ("name", "run_root", "precision.deviations")  # a run's directory and its footnotes
ABSENT = "(absent)"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Mean difference to the baseline over a window, in nats and in percent of the baseline's mean in the window.

    first, last: bounds of the window, in steps or tokens.
    """

    nats: Interval
    percent: float
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Loss on held-out data at the run's last evaluation; gap at the last evaluation that the baseline also has, None
    if the baseline was evaluated on other tokens.
    """

    loss: float
    step: int
    gap: float | None
    gap_percent: float | None
    gap_step: int | None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """raw: median tokens per second over the baseline's. at_loss: ratio of the GPU times until both smoothed losses
    reach `loss`.
    """

    raw: float
    at_loss: float | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The gap at matched steps, thinned to at most 500 points for the JSON file."""

    steps: list[int]
    gap: list[float]
    smoothed: list[float]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The measurements of one run. Gaps and speed are None for the baseline, and if their metrics were not logged."""

    name: str
    path: str
    recipe: str
    model: str
    status: str
    last_step: int
    last_tokens: int | None
    final_loss: Interval
    validation: Validation | None
    below_unigram: bool | None
    gap_steps: Gap | None
    gap_tokens: Gap | None
    gap_curve: Curve | None
    spikes: list[Spike]
    nonfinite_steps: list[int]
    skipped_steps: int | None
    tokens_per_second: float | None
    speed: Speed | None
    peak_memory_gib: float | None
    device: str | None
    overrides: list[str]
    deviations: list[str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The whole report.

    failures: why the --max-gap check fails; None without this check.
    held_out_notes: why held-out losses are not compared, for runs that were evaluated on other tokens.
    uncontrolled: differing keys that change training, except those of precision and communication.
    """

    baseline: str
    window: int
    corpus_hash: str
    unigram_entropy: float | None
    all_below_unigram: bool | None
    max_gap: float | None
    failures: list[str] | None
    runs: list[RunReport]
    held_out_notes: list[str]
    over_seeds: OverSeeds
    differences: dict[str, dict[str, Any]]
    uncontrolled: list[str]


def compare(
    runs: Sequence[Run], *, baseline: str | None = None, window: int | None = None, max_gap: float | None = None
) -> Comparison:
    """Measure all runs against one. Raises ValueError for an unknown baseline or runs without a common step."""
    every, runs = runs, at_one_spacing(runs)
    base = next(run for run, whole in zip(runs, every) if whole is pick_baseline(every, baseline))
    window = window or default_window(runs)
    reports = [report(run, None if run is base else base, window, whole) for run, whole in zip(runs, every)]
    differences = config_differences(runs)
    below = [each.below_unigram for each in reports]
    return Comparison(
        baseline=base.label,
        window=window,
        corpus_hash=base.corpus_hash,
        unigram_entropy=base.unigram_entropy,
        all_below_unigram=None if None in below else all(below),
        max_gap=max_gap,
        failures=None if max_gap is None else failures(reports, max_gap),
        runs=reports,
        held_out_notes=held_out.notes(runs, base),
        over_seeds=over_seeds(runs, base, window),
        differences=differences,
        uncontrolled=[k for k in differences if k.split(".")[0] not in ("precision", "comm") and not is_launch_fact(k)],
    )


def pick_baseline(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run of this name or directory; by default the first whose recipe is bf16, else the first run."""
    if name is None:
        return next((run for run in runs if run.recipe == "bf16"), runs[0])
    for run in runs:
        if name.rstrip("/") in (run.label, run.path.name, str(run.path)):
            return run
    raise ValueError(f"no run is called {name!r}; the runs are {', '.join(run.label for run in runs)}")


def default_window(runs: Sequence[Run]) -> int:
    """Return a tenth of the shortest run: 30 to 200 logged steps, or the whole run if it is shorter."""
    shortest = min(len(run.loss.steps) for run in runs)
    low, high = WINDOW_RANGE
    return min(shortest, max(low, min(high, shortest // 10)))


def at_one_spacing(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with training losses of the steps that all of them log, if their `log_interval` differs and their
    steps have equal tokens: else a mean of the last losses would be over other batches in each. A note says so.
    """
    spacings = [int(np.median(np.diff(run.loss.steps))) if len(run.loss.steps) > 1 else 1 for run in runs]
    common = math.lcm(*spacings)
    tokens = {float(each.values[-1] / each.steps[-1]) for run in runs if len((each := run.series(TOKENS)).steps)}
    kept = [run.loss.steps % common == 0 for run in runs]
    if len(set(spacings)) == 1 or len(tokens) > 1 or not all(map(np.any, kept)):
        return list(runs)
    return [_thinned(run, keep, common) for run, keep in zip(runs, kept)]


def _thinned(run: Run, keep: Array, common: int) -> Run:
    if keep.all():
        return run
    loss = Series(steps=run.loss.steps[keep], values=run.loss.values[keep])
    note = f"losses are compared at multiples of {common} steps, because the runs' log_interval differs"
    return replace(run, metrics={**run.metrics, LOSS: loss}, notes=(note, *run.notes))


def report(run: Run, baseline: Run | None, window: int, whole: Run) -> RunReport:
    """Measure one run; `baseline` is None for the baseline itself. whole: the run with all of its logged losses."""
    loss = run.loss
    tokens, rate, memory, skipped = (run.series(metric).values for metric in (TOKENS, RATE, MEMORY, SKIPPED))
    final = curves.interval(loss.values[-window:])
    validation = measure_validation(run, baseline)
    at_steps, along = gap_at_steps(run, baseline, window) if baseline else (None, None)
    return RunReport(
        name=run.label,
        path=str(run.path),
        recipe=run.recipe,
        model=run.model,
        status=run.status,
        last_step=int(whole.loss.steps[-1]),
        last_tokens=int(tokens[-1]) if len(tokens) else None,
        final_loss=final,
        validation=validation,
        below_unigram=below_unigram(run, final, validation),
        gap_steps=at_steps,
        gap_tokens=gap_at_tokens(run, baseline, window) if baseline else None,
        gap_curve=along,
        spikes=curves.spikes(whole.loss),
        nonfinite_steps=[int(step) for step in whole.loss.steps[~np.isfinite(whole.loss.values)]],
        skipped_steps=int(np.max(skipped)) if len(skipped) else None,
        tokens_per_second=float(np.median(rate)) if len(rate) else None,
        speed=measure_speed(run, baseline, window) if baseline else None,
        peak_memory_gib=float(np.max(memory)) if len(memory) else None,
        device=run.device,
        overrides=list(run.overrides),
        deviations=list(run.deviations),
        notes=list(run.notes),
    )


def gap_at_steps(run: Run, baseline: Run, window: int) -> tuple[Gap, Curve]:
    """Return the gap over the last `window` common steps, and its curve. Raises ValueError without common steps."""
    steps, values, reference = curves.at_common_steps(run.loss, baseline.loss)
    if not len(steps):
        raise ValueError(
            f"{run.label} and {baseline.label} have no common steps: "
            f"{run.loss.steps[0]} to {run.loss.steps[-1]} against {baseline.loss.steps[0]} to {baseline.loss.steps[-1]}"
        )
    apart, keep = values - reference, curves.evenly(len(steps), CURVE_POINTS)
    smoothed = curves.smooth(apart, window)
    along = Curve(steps=steps[keep].tolist(), gap=apart[keep].tolist(), smoothed=smoothed[keep].tolist())
    return gap(steps[-window:], values[-window:], reference[-window:]), along


def gap_at_tokens(run: Run, baseline: Run, window: int) -> Gap | None:
    """Return the gap over the baseline's last `window` token counts within the run's range; None without counts."""
    own, reference = loss_over_tokens(run), loss_over_tokens(baseline)
    if not len(own[0]) or not len(reference[0]):
        return None
    tokens, values, expected = curves.at_common_tokens(own, reference)
    return gap(tokens[-window:], values[-window:], expected[-window:]) if len(tokens) else None


def gap(x: Array, values: Array, reference: Array) -> Gap:
    """Return the mean of values - reference over all points."""
    nats = curves.interval(values - reference)
    return Gap(nats=nats, percent=100 * nats.mean / float(np.mean(reference)), first=int(x[0]), last=int(x[-1]))


def loss_over_tokens(run: Run) -> tuple[Array, Array]:
    """Return (tokens, loss) at the steps where both were logged."""
    _, loss, tokens = curves.at_common_steps(run.loss, run.series(TOKENS))
    return tokens, loss


def measure_validation(run: Run, baseline: Run | None) -> Validation | None:
    """Return the last held-out loss, and its gap at the last evaluation shared with the baseline, if both evaluated the
    same tokens.
    """
    valid = run.series(VALID)
    if not len(valid.values):
        return None
    difference = percent = at = None
    if baseline and held_out.same_tokens((run, baseline)):
        steps, values, reference = curves.at_common_steps(valid, baseline.series(VALID))
        if len(steps):
            difference, at = float(values[-1] - reference[-1]), int(steps[-1])
            percent = 100 * difference / float(reference[-1])
    return Validation(
        loss=float(valid.values[-1]),
        step=int(valid.steps[-1]),
        gap=difference,
        gap_percent=percent,
        gap_step=at,
    )


def measure_speed(run: Run, baseline: Run, window: int) -> Speed | None:
    """Return the speed-up over the baseline; None if a run logged no rate."""
    rates = [each.series(RATE).values for each in (run, baseline)]
    if not all(map(len, rates)):
        return None
    rate, reference = (float(np.median(values)) for values in rates)
    smoothed = [curves.smooth(each.loss.values, window) for each in (run, baseline)]
    target = float(np.max([values[-1] for values in smoothed]))
    times = [time_to(target, each, window) for each in (run, baseline)]
    return Speed(raw=rate / reference, at_loss=times[1] / times[0] if times[0] and times[1] else None, loss=target)


def time_to(target: float, run: Run, window: int) -> float | None:
    """Return GPU seconds, at the median rate, until the smoothed loss is first at most `target`; None if never."""
    tokens, loss = loss_over_tokens(run)
    i = curves.first_at_most(curves.smooth(loss, window), target) if len(loss) else None
    return None if i is None else float(tokens[i]) / float(np.median(run.series(RATE).values))


def below_unigram(run: Run, final: Interval, validation: Validation | None) -> bool | None:
    """Return whether training and held-out losses are below the unigram entropy: more than frequencies was learned."""
    if run.unigram_entropy is None:
        return None
    return final.mean < run.unigram_entropy and (validation is None or validation.loss < run.unigram_entropy)


def failures(reports: Sequence[RunReport], max_gap: float) -> list[str]:
    """Return why the two-sided check of gaps against `max_gap` nats fails: a large or NaN gap, or a run that stopped
    early.
    """
    longest = max(each.last_step for each in reports)
    found = []
    for each in reports:
        if each.status == INCOMPLETE:
            found.append(f"{each.name}: {each.notes[-1]}")
        elif each.status != "done" and each.last_step < longest:
            found.append(f"{each.name}: {each.status} at step {each.last_step}, others are at {longest}")
        for matched, value in gaps(each).items():
            if not abs(value) <= max_gap:
                found.append(f"{each.name}: gap of {value:{'+.4f' if math.isfinite(value) else ''}} nat, {matched}")
    return found


def gaps(each: RunReport) -> dict[str, float]:
    """Return the gaps of a run that --max-gap limits, by what is matched."""
    found = {}
    if each.gap_steps:
        found["matched steps"] = each.gap_steps.nats.mean
    if each.gap_tokens:
        found["matched tokens"] = each.gap_tokens.nats.mean
    if each.validation and each.validation.gap is not None:
        found["validation"] = each.validation.gap
    return found


def config_differences(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return the configuration keys whose values differ between runs: key -> run -> value."""
    keys = sorted(set().union(*(run.config for run in runs)) - set(REPORTED_ELSEWHERE))
    rows = {key: {run.label: run.config.get(key, ABSENT) for run in runs} for key in keys}
    return {key: row for key, row in rows.items() if any(not same(row[runs[0].label], v) for v in row.values())}


def same(a: Any, b: Any) -> bool:
    """Return whether two configuration values are equal: 1 and true are not, two NaN are."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
