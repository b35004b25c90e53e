"""HTML page of a study: its tables and figure, then the curves of one block as in `lowprec compare`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from lowprec_train.tools.compare import measure as compare
from lowprec_train.tools.compare.page import document, sections
from lowprec_train.tools.compare.runs import read_info, read_run
from lowprec_train.tools.study import report
from lowprec_train.tools.study.measure import Cell, Contrast, Measured
from lowprec_train.tools.study.plan import StudyRun


def to_html(measured: Measured, finished: Sequence[StudyRun], out: Path, figure: Path | None) -> str:
    """Return the page, which loads nothing else. finished: runs with curves."""
    block = shown(finished)
    runs = [read_run(out / run.name, read_info(out / run.name), run.name) for run in block]
    baseline = next((run.name for run in block if run.arm == measured.baseline), block[0].name)
    comparison = compare.compare(runs, baseline=baseline)
    text = "".join(cell_section(cell, measured.contrasts) for cell in measured.cells)
    if figure is not None:
        picture = base64.b64encode(figure.read_bytes()).decode()
        text += f'<section><img alt="gaps" style="width:100%" src="data:image/svg+xml;base64,{picture}"></section>'
    text += f'<section><h2>Curves of seed {block[0].seed}</h2><p class="quiet">One block of the study.</p></section>'
    return document.to_html(comparison, runs, above=text)


def shown(finished: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs of the cell and seed with the most runs; estimates are preferred."""
    blocks: dict[tuple[bool, str, int], list[StudyRun]] = {}
    for run in finished:
        blocks.setdefault((run.purpose == "estimate", run.cell, run.seed), []).append(run)
    return blocks[max(blocks, key=lambda key: (key[0], len(blocks[key])))]


def cell_section(cell: Cell, contrasts: Sequence[Contrast]) -> str:
    """Return the section of a cell: table, noise and contrasts."""
    header, cells = report.arm_table(cell)
    rows = [[sections.escape(text) for text in row] for row in cells]
    asked = [each for each in contrasts if each.cell == cell.name]
    lines = "".join(
        f"<li>{sections.escape(f'{each.of} - {each.to}: {report.interval(each.difference)}, {each.words}')}</li>"
        for each in asked
    )
    title = f"{cell.name or 'Whole runs'}: {report.ends_text(cell.tokens)} tokens, "
    title += f"D/N {report.ends_text(cell.tokens_per_parameter, '.2f')}"
    noise = sections.escape(report.noise_text(cell))
    body = f'{sections.table(header, rows)}<p class="quiet">{noise}</p><ul>{lines}</ul>'
    return sections.section(title, body)
