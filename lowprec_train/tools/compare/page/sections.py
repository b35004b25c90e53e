"""The page's text: what report.md says, as HTML. It stands in the file, to be read and searched without scripts."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from lowprec_train.tools.compare import report
from lowprec_train.tools.compare.measure import Comparison, RunReport, same

MANY_KEYS = 12  # differing keys of precision: more are folded away


def escape(text: Any) -> str:
    return html.escape(str(text))


def of_comparison(comparison: Comparison) -> dict[str, str]:
    """The template's pieces of text, by name."""
    runs, notes = comparison.runs, report.footnotes(comparison.runs)
    return {
        "heading": escape(report.heading(comparison)),
        "verdict": verdict(comparison),
        "losses": table(report.LOSS_HEADER, [[name(each, notes), *cells(report.loss_row(each))] for each in runs])
        + seeds(comparison),
        "costs": table(("run", *report.COSTS), [[name(each, notes), *cells(report.cost_row(each))] for each in runs]),
        "bars": bars(comparison),
        "differences": differences(comparison),
        "remarks": remarks(runs),
        "definitions": definitions(comparison),
        "footnotes": footnotes(notes),
    }


def cells(texts: Iterable[str]) -> list[str]:
    return [escape(text) for text in texts]


def name(each: RunReport, notes: dict[str, int]) -> str:
    """A run's name with links to its footnotes."""
    marks = (f'<sup><a href="#note-{notes[text]}">{notes[text]}</a></sup>' for text in each.deviations)
    return run_name(each.name) + "".join(marks)


def run_name(label: str) -> str:
    """A name with the run's swatch, which the scripts colour."""
    return f'<span class="run" data-run="{escape(label)}">{escape(label)}</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """A table of ready cells, the first of a row its heading; wide ones scroll."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in header)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def verdict(comparison: Comparison) -> str:
    """The gate's answer, whether the runs have learned more than word frequencies, and why held-out losses are not
    compared.
    """
    gate = ""
    if comparison.failures is not None:
        kind = "failed" if comparison.failures else "passed"
        text = report.gate(comparison).split("\n", 1)[0]
        reasons = "".join(f"<li>{escape(each)}</li>" for each in comparison.failures)
        gate = f'<div class="gate {kind}"><p>{escape(text)}</p>{f"<ul>{reasons}</ul>" if reasons else ""}</div>'
    held = report.held_out(comparison)
    warning = f'<p class="warning">{escape(held)}</p>' if held else ""
    return f'{gate}<p class="quiet">{escape(report.unigram(comparison))}</p>{warning}'


def seeds(comparison: Comparison) -> str:
    """Gaps over seeds, or why there are none."""
    found = comparison.over_seeds
    items = [f"{each.arm}: {each.nats:+.4f} [{each.low:+.4f}, {each.high:+.4f}], {each.words}" for each in found.gaps]
    lines = "".join(f"<li>{escape(text)}</li>" for text in [*items, *([found.note] if found.note else [])])
    return f'<p class="quiet">Over seeds:</p><ul class="quiet">{lines}</ul>'


def bars(comparison: Comparison) -> str:
    """Speed and memory as bars, each against the largest of its kind; the baseline's own speed-up is 1."""
    runs = comparison.runs
    speeds = [(each.speed.raw, each.speed.at_loss) if each.speed else (None, None) for each in runs]
    measured = any(each.speed for each in runs)
    raw, at_loss = (
        [1.0 if measured and each.name == comparison.baseline else ratio for each, ratio in zip(runs, ratios)]
        for ratios in zip(*speeds)
    )
    kinds = (
        ("Tokens per second and GPU", ",.0f", "", [each.tokens_per_second for each in runs]),
        ("Speed against the baseline", ".2f", "x", raw),
        ("Speed at equal loss", ".2f", "x", at_loss),
        ("Peak memory, GiB", ".2f", "", [each.peak_memory_gib for each in runs]),
    )
    return "".join(
        bar_chart(title, style, unit, dict(zip((each.name for each in runs), values)))
        for title, style, unit, values in kinds
        if any(value is not None for value in values)
    )


def bar_chart(title: str, style: str, unit: str, values: dict[str, float | None]) -> str:
    largest = max(value for value in values.values() if value is not None) or 1.0
    rows = "".join(
        f"<li>{run_name(label)}"
        f'<span class="bar"><i data-run="{escape(label)}" style="width:{100 * value / largest:.2f}%"></i></span>'
        f"<b>{escape(report.number(value, style, unit))}</b></li>"
        for label, value in values.items()
        if value is not None
    )
    return f'<div class="bars"><h3>{escape(title)}</h3><ul>{rows}</ul></div>'


def differences(comparison: Comparison) -> str:
    """What else the runs differ in first, as that is what spoils a comparison; precision and places after it."""
    if not comparison.differences:
        return "<p>None.</p>"
    other = [key for key in comparison.differences if key not in comparison.uncontrolled]
    text = ""
    if comparison.uncontrolled:
        text += (
            '<p class="warning">These runs differ in more than precision, so the gap is not due to precision alone:</p>'
        )
        text += difference_table(comparison, comparison.uncontrolled)
    if other:
        is_open = " open" if len(other) <= MANY_KEYS else ""
        summary = f"{len(other)} key{'s' * (len(other) > 1)} of precision, communication and the launch"
        text += f"<details{is_open}><summary>{summary}</summary>{difference_table(comparison, other)}</details>"
    return text


def difference_table(comparison: Comparison, keys: Sequence[str]) -> str:
    """Keys by run; what is not as in the baseline stands out."""
    names = [each.name for each in comparison.runs]

    def cell(row: dict[str, Any], label: str) -> str:
        value = escape(row[label])
        return value if same(row[label], row[comparison.baseline]) else f"<mark>{value}</mark>"

    rows = [
        [f"<code>{escape(key)}</code>", *(cell(comparison.differences[key], label) for label in names)] for key in keys
    ]
    return table(("key", *names), rows, kind="keys")


def remarks(runs: Iterable[RunReport]) -> str:
    """Overrides of the command line and what the reader of a run's files should know."""
    lines = [f"{run_name(each.name)}: <code>{escape(text)}</code>" for each in runs for text in each.overrides]
    lines += [f"{run_name(each.name)}: {escape(text)}" for each in runs for text in each.notes]
    return section(
        "Overrides and notes", "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>" if lines else ""
    )


def definitions(comparison: Comparison) -> str:
    items = report.definitions(comparison).items()
    return "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in items)


def footnotes(notes: dict[str, int]) -> str:
    items = "".join(f'<li id="note-{number}">{escape(text)}</li>' for text, number in notes.items())
    return section("Not as published", f"<ol>{items}</ol>" if items else "")


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""
