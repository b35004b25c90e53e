"""`lowprec estimate` of the peak of a step: the measured ones."""

import json
from pathlib import Path

import pytest

from lowprec_train.comm.fsdp import encoded
from lowprec_train.config import choices
from lowprec_train.tools.estimate.memory import memory, parameters, states
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train.compose import composed

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BF16_ADAMW = ("optim/master=bf16", "optim/moment@optim.first_moment=bf16", "optim/moment@optim.second_moment=bf16")
GIB = 2**30


def peaks():
    """(file, row) of the latest measured step of every recipe; the last of these files are the oldest."""
    seen = set()
    for name in (
        "step_llama_7b_transposed",
        "step_llama_1b3_transposed",
        "step_llama_7b_8layers",
        "step_llama_7b_own_optimizers",
        "step_llama_1b3",
    ):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        rows = {row["name"]: row for row in reversed(result["rows"])}
        for row in rows.values():
            recipe, *how = row["name"].split(" ", 1)
            which = result["options"]["model"], row["name"]
            if which not in seen and recipe in choices("recipe") and how in ([], ["(own optimizer)"]):
                seen.add(which)
                yield pytest.param(result["options"], row, id=f"{name}-{row['name']}")


FAST = {"step_llama_7b_transposed-coat", "step_llama_7b_own_optimizers-fp4 (own optimizer)"}
PEAKS = [p if p.id in FAST else pytest.param(*p.values, id=p.id, marks=pytest.mark.nightly) for p in peaks()]


@pytest.mark.parametrize(("options", "row"), PEAKS)
def test_peaks_are_those_that_were_measured(options, row, monkeypatch):
    """Of compiled steps on an H200 (docs/results): within 3.5 %, and what stands between steps within 1 %. With
    torch's fused AdamW the benchmark's embedding and gradients were BF16, which a run's are not; the embedding of
    fp4 had moments of 3 bytes with its own optimizer, and has 8 now.
    """
    recipe, *own = row["name"].split(" ", 1)
    monkeypatch.setattr("lowprec_train.tools.estimate.memory.SUM", 4 if own else 2)
    shape = (f"model={options['model']}", f"micro_batch={options['batch']}", f"data.seq_len={options['seq_len']}")
    shape += (f"tokens_per_step={options['batch'] * options['seq_len']}",)
    one = Subject(run=composed(f"+recipe={recipe}", *shape, *(() if own else BF16_ADAMW)))
    (table,) = (w for w in one.weights if w.indexed)
    more = (5 if recipe == "fp4" else 0) if own else 2
    wider = more * table.shape[0] * table.shape[1]
    assert (memory(one, encoded()).bytes - wider) / GIB == pytest.approx(row["peak_gib"], rel=0.035)
    assert (parameters(one) + states(one) - wider) / GIB == pytest.approx(row["resident_gib"], rel=0.012)
