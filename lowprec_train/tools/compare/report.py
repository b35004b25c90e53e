"""Write a comparison as text: Markdown for people (also printed in the terminal), JSON for programs.

`definitions` says how every number is computed. If a run deviates from the published scheme that its recipe is named
after, every report has a footnote: without it a gap of "FP4" means nothing.
"""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from lowprec_train import __version__
from lowprec_train.tools.compare import curves
from lowprec_train.tools.compare.curves import Interval
from lowprec_train.tools.compare.measure import Comparison, RunReport, gaps
from lowprec_train.tools.markdown import aligned

NONE = "-"


def to_json(comparison: Comparison) -> str:
    """Return the comparison as strict JSON: null for absent values, strings "nan", "inf" and "-inf" for non-finite
    ones.
    """
    tree = {
        "version": __version__,
        **asdict(comparison),
        "passed": None if comparison.failures is None else not comparison.failures,
        "definitions": definitions(comparison),
    }
    return json.dumps(strict(tree), indent=2, allow_nan=False) + "\n"


def strict(tree: Any) -> Any:
    """Replace non-finite floats by their names."""
    if isinstance(tree, dict):
        return {str(key): strict(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [strict(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree


def definitions(comparison: Comparison) -> dict[str, str]:
    """Return how each number is computed, by its column."""
    n = comparison.window
    return {
        "train loss": f"mean of the last {n} logged steps, in nats per token",
        "±": f"half of a two-sided 95 % interval of that mean: Student's t on the means of {curves.BATCHES} batches of "
        "neighbouring steps about their straight line, so correlated steps and a falling loss do not narrow it; "
        "it holds for this run's batches and seed, not for other seeds",
        "gap, steps": f"mean of (run - {comparison.baseline}) over the last {n} steps that both logged; "
        "% is of the baseline's mean there",
        "gap, tokens": "the same at the baseline's token counts, the run interpolated linearly between its own",
        "validation": "held-out loss at the last evaluation; its gap at the last evaluation that both logged, "
        "if both were evaluated on the same tokens",
        "spikes": f"steps in a row that leave the median of up to {curves.SPIKE_HALF_WINDOW} steps either side by more "
        f"than noise does: their top by {curves.SPIKE_NATS:g} nat or more and by more than {curves.SPIKE_SINGLE:g} "
        f"times what one step in twenty exceeds by chance, or {curves.SPIKE_LASTING:g} times it where "
        f"{curves.SPIKE_STEPS} steps or more stay above {curves.SPIKE_EDGE:g} times it",
        "curves": f"running means over {n} logged steps about each step; at the start of fewer, and over the last half "
        f"of that the straight line through the last {n}",
        "over seeds": "runs that differ in the seed alone are one configuration; loss = configuration + seed + noise "
        "by least squares with a pooled SD; `not resolved` where the 95 % interval holds 0",
        "non-finite": "logged steps whose training loss is NaN or infinite; none is left out of any mean",
        "skipped": "steps that left the weights alone because the loss or the gradient norm was not finite",
        "tokens/s": "median over the logged steps, per GPU (per process without one)",
        "speed at equal loss": f"ratio of the GPU times until both runs' {n}-step means are first at most the worse "
        "of the two final ones",
        "peak memory": "largest logged value",
    }


def to_markdown(comparison: Comparison, *, figure: str, heatmaps: Sequence[str] = ()) -> str:
    """Return the report. figure, heatmaps: file names of the plot and of the heat maps of telemetry."""
    runs, notes = comparison.runs, footnotes(comparison.runs)
    parts = [
        f"# Loss gap to {comparison.baseline}: " + ", ".join(r.name for r in runs if r.name != comparison.baseline),
        heading(comparison),
        table(LOSS_HEADER, [[marked(each, notes), *loss_row(each)] for each in runs]),
        table(("run", *COSTS), [[marked(each, notes), *cost_row(each)] for each in runs]),
        "\n\n".join(filter(None, (on_cpu(runs), unigram(comparison), held_out(comparison), gate(comparison)))),
        over_seeds(comparison),
        f"![loss curves and gap]({figure})",
        "\n\n".join(f"![roundings, layer by step]({name})" for name in heatmaps),
        overrides(runs),
        differences(comparison),
        bullets("Notes", [f"{each.name}: {note}" for each in runs for note in each.notes]),
        bullets("How the numbers are made", [f"**{key}**: {text}" for key, text in definitions(comparison).items()]),
        "\n".join(f"[^{number}]: Not as published: {text}" for text, number in notes.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(comparison: Comparison) -> str:
    models = ", ".join(dict.fromkeys(each.model for each in comparison.runs))
    tokens = max(each.last_tokens or 0 for each in comparison.runs)
    seen = f", {tokens:,} tokens" if tokens else ""
    steps = max(each.last_step for each in comparison.runs)
    return f"{models}, {steps:,} steps{seen}. Corpus {comparison.corpus_hash[:12]}. Losses in nats per token."


LOSS_HEADER = ("run", "train loss", "gap, steps", "%", "gap, tokens", "%", "validation", "gap", "%")


def loss_row(each: RunReport) -> list[str]:
    cells = [spread(each.final_loss)]
    for gap in (each.gap_steps, each.gap_tokens):
        cells += [spread(gap.nats, "+.4f"), number(gap.percent, "+.2f")] if gap else [NONE, NONE]
    held = each.validation
    cells += [number(held.loss), number(held.gap, "+.4f"), number(held.gap_percent, "+.2f")] if held else [NONE] * 3
    return cells


COSTS: dict[str, Callable[[RunReport], str]] = {
    "status": lambda each: each.status,
    "steps": lambda each: f"{each.last_step:,}",
    "tokens/s": lambda each: number(each.tokens_per_second, ",.0f"),
    "speed": lambda each: number(each.speed.raw if each.speed else None, ".2f", "x"),
    "at equal loss": lambda each: number(each.speed.at_loss if each.speed else None, ".2f", "x"),
    "peak GiB": lambda each: number(each.peak_memory_gib, ".2f"),
    "spikes": lambda each: counted([spike.step for spike in each.spikes]),
    "non-finite": lambda each: counted(each.nonfinite_steps),
    "skipped": lambda each: number(each.skipped_steps, "d"),
}


def cost_row(each: RunReport) -> list[str]:
    return [text(each) for text in COSTS.values()]


def number(value: float | None, style: str = ".4f", unit: str = "") -> str:
    if value is None:
        return NONE
    return f"{value:{style}}{unit}" if math.isfinite(value) else str(value)


def spread(interval: Interval, style: str = ".4f") -> str:
    """Return the mean, and half the interval if there is one."""
    half = "" if interval.high is None else f" ± {interval.high - interval.mean:.4f}"
    return number(interval.mean, style) + half


def counted(steps: Sequence[int]) -> str:
    """Return the number of steps, and the first three."""
    more = ", ..." if len(steps) > 3 else ""
    return f"{len(steps)} (at {', '.join(map(str, steps[:3]))}{more})" if steps else "0"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table that is also aligned as plain text: the first column to the left, the others to the
    right.
    """
    names, *cells = aligned([header, *([cell.replace("|", "\\|") for cell in row] for row in rows)], least=3)
    rule = ["-" * len(names[0]), *("-" * (len(name) - 1) + ":" for name in names[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rule, *cells))


def footnotes(runs: Iterable[RunReport]) -> dict[str, int]:
    """Return the footnote number of each deviation, in order of appearance."""
    texts = dict.fromkeys(text for each in runs for text in each.deviations)
    return {text: number for number, text in enumerate(texts, start=1)}


def marked(each: RunReport, notes: dict[str, int]) -> str:
    """Return the run's name with its footnote marks."""
    return each.name + "".join(f"[^{notes[text]}]" for text in each.deviations)


def on_cpu(runs: Sequence[RunReport]) -> str:
    """Return what runs on a CPU cannot show; "" without such runs."""
    if not any(each.device == "cpu" for each in runs):
        return ""
    return (
        "A CPU computes low precision in FP32 or BF16: compare losses here. Speed and memory are gained on a GPU only."
    )


def unigram(comparison: Comparison) -> str:
    if comparison.unigram_entropy is None:
        return "Validation unigram entropy: not recorded."
    above = [each.name for each in comparison.runs if not each.below_unigram]
    verdict = f"NOT below it: {', '.join(above)}" if above else "every loss is below it"
    return f"Validation unigram entropy: {comparison.unigram_entropy:.4f} nats per token; {verdict}."


def held_out(comparison: Comparison) -> str:
    """Return why held-out losses are not compared; "" if they are."""
    return " ".join(f"{text}." for text in comparison.held_out_notes)


def gate(comparison: Comparison) -> str:
    """Return the result of the --max-gap check, its limit and the gap that decided it."""
    if comparison.failures is None:
        return ""
    if comparison.failures:
        reasons = "\n".join(f"- {text}" for text in comparison.failures)
        return f"Gate of ±{comparison.max_gap:g} nat: FAILED.\n\n{reasons}"
    held = [(abs(value), each.name, matched) for each in comparison.runs for matched, value in gaps(each).items()]
    value, name, matched = max(held, key=lambda each: each[0])
    return f"Gate of ±{comparison.max_gap:g} nat: passed; the largest gap is {value:.4f} ({name}, {matched})."


def over_seeds(comparison: Comparison) -> str:
    """Return the gaps over seeds, or why there are none."""
    found = comparison.over_seeds
    note = f"Over seeds: {found.note}." if found.note else ""
    if not found.gaps:
        return note
    rows = [
        [each.arm, str(each.seeds), f"{each.nats:+.4f} [{each.low:+.4f}, {each.high:+.4f}]", each.words]
        for each in found.gaps
    ]
    heading = f"Over seeds ({found.loss}; residual SD {found.s:.4f} nat, {found.freedom} degrees of freedom):"
    return "\n\n".join(filter(None, (heading, table(("configuration", "seeds", "gap [95 %]", ""), rows), note)))


def overrides(runs: Iterable[RunReport]) -> str:
    return bullets("Overrides", [f"{each.name}: `{text}`" for each in runs for text in each.overrides])


def differences(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    names = [each.name for each in comparison.runs]
    rows = [
        [f"`{key}`", *(textwrap.shorten(str(row[name]), 60) for name in names)]
        for key, row in comparison.differences.items()
    ]
    text = "## Configuration keys that differ\n\n" + table(("key", *names), rows)
    if comparison.uncontrolled:
        keys = ", ".join(f"`{key}`" for key in comparison.uncontrolled)
        text += f"\n\nThese runs differ in more than precision, so the gap is not due to precision alone: {keys}."
    return text


def bullets(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
