"""A study's report as Markdown and JSON, with contrasts, number of runs, noise and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lowprec_train import __version__
from lowprec_train.tools.compare.report import NONE, number, strict
from lowprec_train.tools.markdown import table
from lowprec_train.tools.study.definition import Study
from lowprec_train.tools.study.measure import RESOLUTION, ArmRow, Cell, Contrast, Measured
from lowprec_train.tools.study.rms_spikes import AHEAD, LARGE, RmsSpikes
from lowprec_train.tools.study.statistics import Estimate
from lowprec_train.tools.study.sweep import WORKABLE, SweepArm, SweepRow

COLUMNS: dict[str, Callable[[ArmRow], str]] = {
    "arm": lambda row: row.arm,
    "tokens": lambda row: f"{row.tokens:,}",
    "n": lambda row: str(len(row.seeds)),
    "loss": lambda row: number(row.loss),
    "gap, nat [95 %]": lambda row: interval(row.gap),
    "gap %": lambda row: number(row.percent, "+.2f"),
    "predicted %": lambda row: number(row.predicted, "+.2f"),
    "in the weights": lambda row: interval(row.weights),
    "forward rounding": lambda row: interval(row.forward),
    "extra tokens %": lambda row: extra(row),
    "tokens/s": lambda row: number(row.speed, ".2f"),
    "speed at equal loss": lambda row: number(row.at_loss, ".2f"),
    "may be said": lambda row: row.words or NONE,
}
HEALTH: dict[str, Callable[[ArmRow], str]] = {
    "arm": lambda row: row.arm,
    "seeds": lambda row: ", ".join(map(str, row.seeds)),
    "training gap, last tenth": lambda row: interval(row.tail),
    "clipped %": lambda row: number(None if row.clipped is None else 100 * row.clipped, ".1f"),
    "spikes": lambda row: str(row.spikes),
    "skipped": lambda row: str(row.skipped),
    "SD of residuals": lambda row: number(row.spread),
    "sharpness": lambda row: number(row.sharpness),
    "after RMS spikes": lambda row: rms_spikes_text(row.rms_spikes),
}


def to_json(measured: Measured) -> str:
    """Return strict JSON: absent values are null, non-finite values are names; estimates include their intervals."""
    tree = {"version": __version__, **asdict(measured, dict_factory=_plain), "definitions": definitions(measured)}
    return json.dumps(strict(tree), indent=2, allow_nan=False) + "\n"


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the fields of a dataclass; add intervals and p to an estimate."""
    found = dict(items)
    if found.keys() == {"nats", "error", "freedom"}:
        made = Estimate(**found)
        found |= {end: getattr(made, end) for end in ("low", "high", "at_least", "at_most", "p")}
    return found


def definitions(measured: Measured) -> dict[str, str]:
    """Return the definition of each number."""
    return {
        "loss": "nats a token on the whole validation split after the last step, with the arm's own forward pass; "
        "least-squares mean over all seeds of the cell, or the mean of an arm's own seeds where it has none in common",
        "gap": f"arm - {measured.baseline}, from loss = arm + seed + noise by least squares, with the residual SD s "
        "pooled over all arms; where the arms' noise differs (Levene, p < 0.01) from the arm's own pairs",
        "in the weights": "the gap of the same weights with a forward pass in BF16",
        "forward rounding": "own forward pass - BF16 forward pass of the same weights, with the interval of "
        "the seeds' pairs",
        "extra tokens": f"D / D' - 1, where {measured.baseline} trained on D' tokens has this loss, between runs of "
        "their own length in log D that have seeds in common",
        "training gap, last tenth": "the gap of the mean training losses of the last tenth of the steps: a check",
        "tokens/s": f"median rate over {measured.baseline}'s, of runs that had their device to themselves, all on one "
        "kind of device",
        "predicted": "an expectation that the file of the study holds",
        "speed at equal loss": "tokens/s / (1 + extra tokens)",
        "may be said": "the end of the one-sided 95 % interval that is on the safe side",
        "contrasts": "named before the runs; p is adjusted over all of them (Holm); not resolved where it is 0.05 or "
        "more",
        "unstable": "a seed that diverged, or ended above the unigram entropy of the validation text where others did "
        "not; the arm has no gap then, and no seed is left out",
        "clipped": "share of the steps whose gradient was longer than max_grad_norm",
        "works": f"of a sweep: no seed is unstable, and the mean loss is at most {WORKABLE:g} times the arm's best",
        "gap at own best": f"of a sweep: arm at its best value - {measured.baseline} at its own, from the seeds' pairs",
        "sharpness": "100 (max L - L) / (1 + L) where logits y of last tokens move by at most 0.001 (|y| + 1); L: mean "
        "loss of the last tokens of 256 sequences, with the run's own forward pass; mean over seeds",
        "after RMS spikes": f"those with an event 1 to {AHEAD} steps before them: an update of a matrix whose RMS is "
        f"above {LARGE:g}; chance: the share of steps that lie so behind one",
        "sensitivity": "mean over values and seeds of min(loss, loss at the start), less the loss of the best value",
    }


def to_markdown(measured: Measured, study: Study, *, figure: str, sweep: str = "") -> str:
    """Return the report. figure, sweep: file names of the plots; sweep is "" if there is none."""
    compared = any(row.arm == measured.baseline for cell in measured.cells for row in cell.arms)
    parts = [
        f"# Study {measured.name}: gaps to {measured.baseline}",
        "" if compared or not measured.cells else f"No run of {measured.baseline} is here, so no arm has a gap to it.",
        *(cell_text(each, measured.contrasts) for each in measured.cells),
        f"![gap against tokens, and final gaps]({figure})" if measured.cells else "",
        *(f"## Gate\n\n{noise_text(each)}" for each in measured.gate),
        sweep_text(measured),
        f"![losses of the sweep]({sweep})" if sweep else "",
        law_text(measured),
        setting_text(measured, study),
        "## How the numbers are made\n\n"
        + "\n".join(f"- **{key}**: {text}" for key, text in definitions(measured).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def cell_text(cell: Cell, contrasts: Sequence[Contrast]) -> str:
    """Return the section of a cell."""
    asked = [each for each in contrasts if each.cell == cell.name]
    lines = [
        f"## {cell.name or 'Whole runs'}",
        f"{ends_text(cell.tokens)} tokens, {ends_text(cell.parameters)} parameters without embedding and head, "
        f"D/N {ends_text(cell.tokens_per_parameter, '.2f')}.",
        "\n".join(table(*arm_table(cell))),
        noise_text(cell),
        contrast_text(asked),
        "\n".join(table(list(HEALTH), ([text(row) for text in HEALTH.values()] for row in cell.arms))),
    ]
    return "\n\n".join(line for line in lines if line)


def ends_text(ends: tuple[float, float], form: str = ",") -> str:
    """Format a range, or one value if both ends are equal."""
    return " to ".join(dict.fromkeys(format(each, form) for each in ends))


def arm_table(cell: Cell) -> tuple[list[str], list[list[str]]]:
    """Return header and rows without empty columns, and without the tokens if all runs have as many."""
    columns = {name: [text(row) for row in cell.arms] for name, text in COLUMNS.items()}
    if cell.tokens[0] == cell.tokens[1]:
        del columns["tokens"]
    kept = {name: texts for name, texts in columns.items() if {*texts} != {NONE}}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def rms_spikes_text(found: RmsSpikes | None) -> str:
    if found is None:
        return NONE
    return f"{found.preceded} of {found.spikes}, {found.events} events, chance {100 * found.chance:.0f} %"


def extra(row: ArmRow) -> str:
    if row.extra is None:
        return NONE
    ends = (row.extra.low, row.extra.high)
    between = "" if None in ends else f" [{', '.join(number(100 * end, '+.1f') for end in ends if end is not None)}]"
    return number(100 * row.extra.share, "+.1f") + between


def noise_text(cell: Cell) -> str:
    """Return the residual SD, its degrees of freedom, the seeds needed, and the noise between repeats."""
    if cell.s is None:
        lines = ["No residual, so no interval: that takes two seeds of two stable arms. Nothing can be ranked."]
    else:
        lines = [f"Residual SD s = {cell.s:.4f} nat with {cell.freedom} degrees of freedom."]
        lines += [f"Seeds needed for +-{100 * RESOLUTION:g} % of the loss: {cell.needed}."] if cell.needed else []
    if cell.levene is not None:
        verdict = (
            "below 0.01: intervals are from pairs" if cell.uneven else "so the SD is pooled (it is not below 0.01)"
        )
        lines.append(f"Levene's test of equal noise: p = {cell.levene:.3f}, {verdict}.")
    differences = [each.difference for each in cell.repeats]
    lines += [f"{each.arm}, seed {each.seed}, trained twice: {each.difference:+.5f} nat." for each in cell.repeats]
    if len(differences) > 1:
        sd = math.sqrt(sum(each * each for each in differences) / (2 * len(differences)))
        lines.append(f"SD of one run between such repeats: {sd:.5f} nat.")
    return " ".join(lines)


def contrast_text(asked: Sequence[Contrast]) -> str:
    if not asked:
        return ""
    rows = [[f"{each.of} - {each.to}", interval(each.difference), number(each.p, ".3f"), each.words] for each in asked]
    return "Contrasts named beforehand:\n\n" + "\n".join(table(("contrast", "nat [95 %]", "p (Holm)", ""), rows))


def sweep_text(measured: Measured) -> str:
    """Return the tables of a sweep: losses by setting and arm, then a summary of each arm."""
    if not measured.sweep:
        return ""
    arms, axis = [each.arm for each in measured.sweep_arms], axis_of(measured.sweep)
    cells = {(each.setting, each.arm): each for each in measured.sweep}
    ordered = sorted(measured.sweep, key=lambda row: row.value or 0.0)
    settings, seeds = dict.fromkeys(row.setting for row in ordered), max(len(row.seeds) for row in ordered)

    def by_setting(cell: Callable[[SweepRow | None], str]) -> str:
        rows = [[name.removeprefix(f"{axis}="), *(cell(cells.get((name, arm))) for arm in arms)] for name in settings]
        return "\n".join(table((axis or "setting", *arms), rows))

    said = (
        f"Mean loss +- SD of {seeds} seeds, or of n. Bold: the arm's best; in parentheses: more than "
        f"{100 * (WORKABLE - 1):g} % above it. A gap at an arm's own best is of the runs that chose the value, which "
        "favours arms that depend on it: ask runs of other seeds."
    )
    header = ("arm", "works at", "best", "loss", "gap at own best", f"gap at {measured.baseline}'s best", "sensitivity")
    of_arms = [sweep_arm_cells(each, axis) for each in measured.sweep_arms]
    parts = ["## Sweep", by_setting(lambda row: sweep_cell(row, seeds)), said, "\n".join(table(header, of_arms))]
    parts += [
        f"The {end} value that was tried is the best of {', '.join(found)}: a better one may lie beyond it, and the "
        "range in which an arm works is not known to end there."
        for end in ("lowest", "highest")
        if (found := [each.arm for each in measured.sweep_arms if each.edge == end])
    ]
    if any(row.rms_spikes is not None for row in measured.sweep):
        parts += [
            "Loss spikes after RMS spikes:",
            by_setting(lambda row: rms_spikes_text(row.rms_spikes if row else None)),
        ]
    if any(row.sharpness is not None for row in measured.sweep):
        parts += ["Sharpness:", by_setting(lambda row: number(row.sharpness if row else None))]
    return "\n\n".join(parts)


def axis_of(rows: Sequence[SweepRow]) -> str:
    """Return the key whose values are swept; "" if the settings are not numbers of one key."""
    axes = {row.axis for row in rows}
    return axes.pop() if len(axes) == 1 else ""


def sweep_cell(row: SweepRow | None, seeds: int) -> str:
    if row is None:
        return NONE
    if row.unstable:
        return f"unstable {len(row.unstable)} of {len(row.seeds)}"
    text = number(row.loss) + ("" if row.spread is None else f" +- {row.spread:.4f}")
    text += f" n={len(row.seeds)}" if len(row.seeds) < seeds else ""
    return f"**{text}**" if row.best else text if row.works else f"({text})"


def sweep_arm_cells(each: SweepArm, axis: str) -> list[str]:
    return [
        each.arm,
        ("; " if not axis else ", ").join(name.removeprefix(f"{axis}=") for name in each.works) or "none of them",
        NONE if each.best is None else each.best.removeprefix(f"{axis}="),
        number(each.loss),
        interval(each.own),
        interval(each.common),
        number(each.sensitivity, ".3f"),
    ]


def law_text(measured: Measured) -> str:
    if measured.law is None:
        return ""
    law = measured.law
    text = (
        f"## Scaling law of {measured.baseline}\n\nL = (A / N^a + B / D^b)^g + E with A {law.A:.3g}, a {law.a:.3f}, "
        f"B {law.B:.3g}, b {law.b:.3f}, g {law.g:.3f}, E {law.E:.3f}; RMS of log residuals {100 * law.error:.2f} %."
    )
    rows = [[each.arm, f"{each.parameters:.3f}", f"{each.tokens:.3f}"] for each in measured.efficiencies]
    return text + ("\n\n" + "\n".join(table(("arm", "eff_N", "eff_D"), rows)) if rows else "")


def setting_text(measured: Measured, study: Study) -> str:
    """Return the settings that reproduce the study."""
    lines = [f"- study `{study.name}`, overrides of all runs: `{' '.join(study.overrides)}`"]
    lines += [f"- {arm.name}: `{' '.join((f'+recipe={arm.recipe}', *arm.overrides))}`" for arm in study.arms.values()]
    lines.append(f"- corpus hash {measured.corpus_hash}")
    if measured.left:
        lines.append(f"- not finished, not in any number: {', '.join(measured.left)}")
    return "## Setting\n\n" + "\n".join(lines)


def interval(estimate: Estimate | None) -> str:
    """Format an estimate, such as `+0.0030 [+0.0010, +0.0050]`."""
    if estimate is None:
        return NONE
    ends = "" if estimate.low is None else f" [{estimate.low:+.4f}, {estimate.high:+.4f}]"
    return f"{estimate.nats:+.4f}{ends}"
