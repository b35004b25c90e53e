"""Draw the figure of a comparison: loss curves, their last quarter enlarged, the gap along the run and the final gap.

Raw losses are faint, running means strong and drawn to the last step (`curves.drawn`). Every run has its own colour
(`colours.py`), dashes and marker, so runs can be distinguished also in grey. A non-finite loss is a cross at the top.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowprec_train.tools.compare import colours, curves
from lowprec_train.tools.compare.measure import Comparison, RunReport
from lowprec_train.tools.compare.report import number, spread
from lowprec_train.tools.compare.runs import TOKENS, VALID, Array, Run, Series

DASHES = ((0, (6, 1.4)), (0, (2.2, 1.2)), (0, (6, 1.4, 1.4, 1.4)), (0, (1, 1)))
MARKERS = "osD^vP"
INK, QUIET, GATE, FAINT = "#3c4043", "#80868b", "#b3261e", 0.16
DIVERGED = 1.0  # nats: a run with a larger gap leaves the axes, so that it does not flatten the others
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": "#9aa0a6",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8eaed",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "legend.handlelength": 3.2,
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One run with its position on the x axis and its style.

    place: its index among the runs without the baseline, which decides colour, dashes and marker; None: baseline.
    """

    run: Run
    report: RunReport
    place: int | None
    scale: float
    over_tokens: bool
    window: int

    def x(self, steps: Array) -> Array:
        """Return the positions of steps on the x axis."""
        tokens = self.run.series(TOKENS)
        return np.interp(steps, tokens.steps, tokens.values) / self.scale if self.over_tokens else steps

    def smoothed(self, series: Series) -> tuple[Array, Array]:
        """Return (x, y) of the running mean."""
        return self.x(series.steps), curves.drawn(series.values, self.window)

    @property
    def colour(self) -> str:
        return colours.BASELINE[0] if self.place is None else colours.of_run(self.place)[0]

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": "-" if self.place is None else DASHES[self.place % len(DASHES)]}

    @property
    def marker(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": MARKERS[0 if self.place is None else (self.place + 1) % len(MARKERS)]}


def save(comparison: Comparison, runs: Sequence[Run], target: Path) -> None:
    """Draw `comparison` of `runs` (in its order) into a PNG file, 1760 pixels wide."""
    notes = footnotes(comparison)
    with png(target, 7.4 + 0.17 * len(notes), title(comparison)) as figure:
        draw(figure, comparison, runs, notes)


@contextmanager
def png(target: Path, height: float, heading: str, style: Mapping[str, Any] | None = None) -> Iterator[Figure]:
    """Yield an empty figure of 11 by `height` inches; write it to a PNG file with 160 pixels per inch at the end."""
    with matplotlib.rc_context(STYLE | dict(style or {})):
        figure = Figure(figsize=(11, height), layout="constrained")
        figure.suptitle(heading, x=0.012, ha="left", fontsize=13, fontweight="bold", color="#202124")
        yield figure
        figure.savefig(target, dpi=160, format="png", facecolor="white")


def draw(figure: Figure, comparison: Comparison, runs: Sequence[Run], notes: Sequence[str]) -> None:
    """Draw the four panels."""
    subjects, label = subjects_of(comparison, runs)
    axes = figure.subplots(2, 2, width_ratios=(2.4, 1))
    draw_curves(axes[0, 0], comparison, subjects)
    draw_ends(axes[0, 1], subjects)
    draw_gaps(axes[1, 0], comparison, subjects)
    draw_final_gaps(axes[1, 1], comparison, subjects, limits=axes[1, 0].get_ylim())
    for ax in (axes[0, 0], axes[0, 1], axes[1, 0]):
        ax.set_xlabel(label)
    if notes:
        figure.supxlabel("\n".join(notes), x=0.012, ha="left", fontsize=8, color=QUIET)


def title(comparison: Comparison) -> str:
    model = ", ".join(dict.fromkeys(each.model for each in comparison.runs))
    if comparison.failures is None:
        return f"{model}: loss against {comparison.baseline}"
    verdict = "FAILED" if comparison.failures else "passed"
    return f"{model}: loss against {comparison.baseline}, gate of ±{comparison.max_gap:g} nat {verdict}"


def footnotes(comparison: Comparison) -> list[str]:
    """Return footnote lines: why held-out losses are not compared, and the parts of a published scheme that a run
    leaves out.
    """
    texts: dict[str, list[str]] = {}
    for each in comparison.runs:
        for text in each.deviations:
            texts.setdefault(text, []).append(each.name)
    lines = [*comparison.held_out_notes]
    lines += [f"{', '.join(names)}, not as published: {text}" for text, names in texts.items()]
    return [row for line in lines for row in textwrap.wrap(line, 165, subsequent_indent="    ")]


def subjects_of(comparison: Comparison, runs: Sequence[Run]) -> tuple[list[Subject], str]:
    """Return the runs with their styles, and the label of the x axis: tokens if every run logged them, else steps."""
    over_tokens = all(len(run.series(TOKENS).steps) for run in runs)
    most = max(run.series(TOKENS).values[-1] for run in runs) if over_tokens else 0
    scale, unit = next(((s, u) for s, u in ((1e9, "billion"), (1e6, "million")) if most >= s), (1e3, "thousand"))
    others = count()
    subjects = [
        Subject(
            run=run,
            report=report,
            place=None if run.label == comparison.baseline else next(others),
            scale=scale,
            over_tokens=over_tokens,
            window=comparison.window,
        )
        for run, report in zip(runs, comparison.runs)
    ]
    return subjects, f"{unit} tokens" if over_tokens else "steps"


def shortened(label: str) -> str:
    """Shorten a label to its last 24 characters: paths and generated names differ at their ends."""
    return label if len(label) <= 24 else "…" + label[-23:]


def draw_curves(ax: Axes, comparison: Comparison, subjects: Sequence[Subject]) -> None:
    """Draw all losses, with markers for held-out ones, and the unigram entropy, which a working network goes below."""
    for subject in reversed(subjects):
        label = f"{shortened(subject.run.label)}  {spread(subject.report.final_loss)}"
        draw_series(ax, subject, subject.run.loss, label=label)
        valid = subject.run.series(VALID)
        ax.plot(subject.x(valid.steps), valid.values, ls="", mfc="white", ms=4.5, **subject.marker)
        draw_nonfinite(ax, subject)
    limit_losses(ax, comparison, subjects)
    if comparison.unigram_entropy is not None and comparison.unigram_entropy < ax.get_ylim()[1]:
        ax.axhline(comparison.unigram_entropy, color=QUIET, lw=1, ls=(0, (1, 2)))
        ax.annotate(
            f"validation unigram entropy {comparison.unigram_entropy:.2f}",
            (1, comparison.unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=QUIET,
        )
    heading = f"mean of the last {comparison.window} steps ± 95 %"
    legend = ax.legend(reverse=True, loc="upper right", title=heading, alignment="left", title_fontsize=8.5)
    legend.set(zorder=5)
    ax.set(title="Training loss (markers: held-out)", ylabel="nats per token")


def draw_series(ax: Axes, subject: Subject, series: Series, **options: Any) -> Array:
    """Draw a faint raw curve and its running mean; return the mean."""
    x, smoothed = subject.smoothed(series)
    ax.plot(x, series.values, color=subject.colour, lw=0.7, alpha=FAINT)
    ax.plot(x, smoothed, lw=1.7, **subject.line, **options)
    return smoothed


def draw_nonfinite(ax: Axes, subject: Subject) -> None:
    """Draw crosses at the upper edge where the loss is not finite."""
    loss = subject.run.loss
    x = subject.x(loss.steps[~np.isfinite(loss.values)])
    top = ax.get_xaxis_transform()
    ax.plot(x, np.full(len(x), 0.97), ls="", marker="x", mew=1.6, color=subject.colour, transform=top, zorder=6)


def limit_losses(ax: Axes, comparison: Comparison, subjects: Sequence[Subject]) -> None:
    """Set the y range to all losses, except that a diverged run may not flatten the others."""
    base = next(s for s in subjects if s.run.label == comparison.baseline).run.loss
    losses = [finite(s.run.loss.values) for s in subjects]
    values, reference = np.concatenate(losses), finite(base.values)
    if not len(values):
        return
    low, high = min(values.min(), comparison.unigram_entropy or np.inf), values.max()
    if len(reference):
        high = min(high, reference.max() + max(0.35 * np.ptp(reference), DIVERGED))
    margin = 0.04 * max(high - low, 1e-3)
    ax.set_ylim(low - margin, high + margin)


def finite(values: Array) -> Array:
    return values[np.isfinite(values)]


def draw_ends(ax: Axes, subjects: Sequence[Subject]) -> None:
    """Draw the running means of the last quarter, with the final mean and its interval at the right."""
    drawn: list[Any] = []
    highest = []
    for place, subject in enumerate(subjects):
        loss = subject.run.loss
        last = max(len(loss.steps) // 4, min(2, len(loss.steps)))
        x, smoothed = (values[-last:] for values in subject.smoothed(loss))
        ax.plot(x, smoothed, lw=1.7, **subject.line)
        at = x[-1] + (place + 1) * 0.035 * max(np.ptp(x), 1e-9)
        draw_interval(ax, at, subject.report.final_loss, subject)
        final = subject.report.final_loss
        drawn += [smoothed, *(value for value in (final.low, final.mean, final.high) if value is not None)]
        highest += [finite(smoothed).max()] if np.isfinite(smoothed).any() else []
    values = finite(np.hstack(drawn))
    if len(values):
        high = min([values.max(), *(top + DIVERGED for top in highest)])
        margin = 0.08 * max(high - values.min(), 1e-3)
        ax.set_ylim(values.min() - margin, high + margin)
    ax.set(title="The last quarter, enlarged", ylabel="nats per token")


def draw_interval(ax: Axes, x: float, interval: curves.Interval, subject: Subject) -> None:
    """Draw a mean with its 95 % interval."""
    if interval.low is not None and interval.high is not None:
        ax.plot([x, x], [interval.low, interval.high], color=subject.colour, lw=1.4, alpha=0.6)
    ax.plot([x], [interval.mean], ls="", ms=5, **subject.marker)


def draw_gaps(ax: Axes, comparison: Comparison, subjects: Sequence[Subject]) -> None:
    """Draw run minus baseline at matched steps: raw, and its running mean."""
    base = next(s for s in subjects if s.run.label == comparison.baseline)
    reaches = []
    for subject in subjects:
        if subject is base:
            continue
        steps, values, reference = curves.at_common_steps(subject.run.loss, base.run.loss)
        smoothed = draw_series(ax, subject, Series(steps=steps, values=values - reference))
        settled = np.append(smoothed[len(smoothed) // 10 :], final_gaps(subject.report))
        reaches.append(float(np.abs(finite(settled)).max(initial=1e-3)))
    draw_zero_and_gate(ax, comparison)
    reach = 1.25 * max((each for each in reaches if each < DIVERGED), default=DIVERGED)
    if comparison.max_gap is not None:
        reach = max(reach, min(1.12 * comparison.max_gap, 5 * reach))
    ax.set_ylim(-reach, reach)
    ax.set(title=f"Gap to {shortened(base.run.label)} at matched steps", ylabel="nats per token")


def final_gaps(report: RunReport) -> list[float]:
    """Return the values of a run in the panel of final gaps, with the ends of the interval."""
    nats = report.gap_steps.nats if report.gap_steps else None
    held = report.validation.gap if report.validation else None
    values = ([nats.mean, nats.low, nats.high] if nats else []) + [held]
    return [value for value in values if value is not None]


def draw_zero_and_gate(ax: Axes, comparison: Comparison) -> None:
    """Draw the line of the baseline and both limits of --max-gap."""
    ax.axhline(0, color=colours.BASELINE[0], lw=1.2)
    for side in (-1, 1) if comparison.max_gap is not None else ():
        ax.axhline(side * (comparison.max_gap or 0), color=GATE, lw=1.2, ls=(0, (4, 3)))


def draw_final_gaps(
    ax: Axes, comparison: Comparison, subjects: Sequence[Subject], *, limits: tuple[float, float]
) -> None:
    """Draw one column per run: the final gap with its interval (filled), the held-out gap (hollow)."""
    others = [subject for subject in subjects if subject.run.label != comparison.baseline]
    crowded = len(others) > 5
    draw_zero_and_gate(ax, comparison)
    for place, subject in enumerate(others):
        gap, held = subject.report.gap_steps, subject.report.validation
        if gap:
            draw_interval(ax, place - 0.12, gap.nats, subject)
            text, where = number(gap.nats.mean, "+.3f"), ("data", "axes fraction")
            ax.annotate(
                text, (place, 0.02), xycoords=where, ha="center", fontsize=8.5, color=INK, rotation=90 * crowded
            )
        if held and held.gap is not None:
            ax.plot([place + 0.12], [held.gap], ls="", ms=5.5, mfc="white", **subject.marker)
    names = [shortened(subject.run.label) for subject in others]
    ax.set_xticks(range(len(others)), names)
    if sum(map(len, names)) > 32:
        ax.tick_params(axis="x", rotation=30)
        for tick in ax.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor", fontsize=8)
    ax.set_xlim(-0.6, len(others) - 0.4)
    ax.set_ylim(limits)
    ax.grid(visible=False, axis="x")
    ax.set_title("Final gap, 95 % (hollow: held-out)")
