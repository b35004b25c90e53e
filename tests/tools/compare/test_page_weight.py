"""What report.html weighs: the figures of docs/comparing.md, of ten runs of 5,000 steps made here.

pytest -s -m nightly tests/tools/compare/test_page_weight.py
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lowprec_train.tools.compare import measure
from lowprec_train.tools.compare.page import document
from lowprec_train.tools.compare.runs import read_runs
from lowprec_train.tools.compare.telemetry import LABELS

STEPS, RUNS, BLOCKS, EVERY = 5000, 10, 12, 50
LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
OPERANDS = [(gemm, side) for gemm in ("fprop", "dgrad", "wgrad") for side in "ab"]
FIGURES = [figure for figure in LABELS if figure != "stalled_pct"]
STATES = ("exp_avg", "exp_avg_sq")


def metrics(rng, place):
    """Lines as a run on a GPU writes them: 13 series of noise about curves."""
    steps = np.arange(1, STEPS + 1)
    noise = np.random.default_rng(0).standard_normal(STEPS)  # batches are the same in all runs
    loss = 3 + 6 * np.exp(-steps / 300) + 0.05 * noise + 0.002 * rng.standard_normal(STEPS) + place / 100
    names = ("train/grad_norm", "train/lr", "time/step_ms", "time/data_ms", "perf/tokens_per_sec_per_gpu")
    names += ("perf/tflops_per_gpu", "perf/sol", "perf/mfu_bf16peak", "mem/peak_gib", "mem/alloc_retries")
    others = {name: 1000 * (1 + place / 10) + rng.standard_normal(STEPS) for name in names}
    for i, step in enumerate(steps.tolist()):
        line = {"step": step, "train/loss": loss[i], "data/tokens": 65536 * step, "train/skipped": 0.0}
        yield line | {name: values[i] for name, values in others.items()}


def telemetry(rng):
    """A row for each rounding of each watched step."""
    for step in range(EVERY, STEPS + 1, EVERY):
        for layer in (f"blocks.{block}.{linear}" for block in range(BLOCKS) for linear in LINEARS):
            for gemm, side in OPERANDS:
                figures = dict(zip(FIGURES, (20 + rng.standard_normal(len(FIGURES))).tolist()))
                yield {"step": step, "site": layer, "gemm": gemm, "operand": side} | figures
            for state in STATES:
                drawn = (20 + rng.standard_normal(2)).tolist()
                yield {"step": step, "parameter": f"{layer}.weight", "state": state} | dict(
                    zip(("sqnr_db", "stalled_pct"), drawn)
                )


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.nightly
def test_the_page_weighs_what_the_documentation_says(make_run):
    """Without telemetry, and with it at every 50th step of nine runs of twelve blocks."""
    paths = [make_run("bf16" if not place else f"r{place}", [1.0]) for place in range(RUNS)]
    for place, path in enumerate(paths):
        write(path / "metrics.jsonl", metrics(np.random.default_rng(place), place))
    weights = [weight(paths)]
    for place, path in enumerate(paths[1:]):
        write(path / "telemetry.jsonl", telemetry(np.random.default_rng(place)))
    weights.append(weight(paths))
    print(f"ten runs of {STEPS} steps: {weights[0] / 1e6:.2f} MB, with telemetry {weights[1] / 1e6:.2f} MB")
    text = " ".join((Path(__file__).parents[3] / "docs" / "comparing.md").read_text().split())
    (stated,) = re.findall(r"5,000 steps has ([\d.]+) MB\. It has ([\d.]+) MB if nine", text)
    assert weights == pytest.approx([1e6 * float(each) for each in stated], rel=0.05)


def weight(paths):
    runs = read_runs(paths)
    return len(document.to_html(measure.compare(runs), runs).encode())
