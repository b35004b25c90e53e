"""A table of measured step times and the estimates of `lowprec estimate`.

    python scripts/estimate_time.py         writes docs/results/estimate_time.json and .md from the results beside it

Measured: `lowprec bench step` (BF16 weights and torch's fused AdamW, unless it says "own"), `lowprec bench parallel`,
and runs of the whole 7B model on one GPU (docs/memory.md). Rates: `lowprec_train.tools.estimate.device`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowprec_train.config import RunConfig
from lowprec_train.tools.bench.contestant import Work
from lowprec_train.tools.bench.sharded import Arm
from lowprec_train.tools.estimate.device import DEVICES, H200, Device
from lowprec_train.tools.estimate.step_time import step_time
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.tools.markdown import number, table
from lowprec_train.train import build
from lowprec_train.train.compose import composed

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SEVEN, SMALL = ("model=llama_7b", "model.layers=8"), ("model=llama_1b3",)
STEPS = {
    "step_llama_7b_rotary_turn": SEVEN,
    "step_llama_7b_8layers": SEVEN,
    "step_llama_1b3": SMALL,
    "step_llama_7b_own_optimizers": SEVEN,
}
PARALLEL = (
    "parallel_llama_7b_8layers_2",
    "parallel_llama_7b_8layers_2_batch2",
    "parallel_llama_7b_4_h100",
    "parallel_llama_7b_4_h100_batch2",
    "parallel_llama_7b_4_h100_pairs",
    "parallel_llama_7b_4_h100_pairs_peers",
    "parallel_llama_7b_4_h100_pairs_batch2",
    "parallel_llama_7b_4_h100_no_copy",
    "parallel_llama_7b_4_h100_no_copy_batch2_first",
    "parallel_llama_7b_4_h100_no_copy_batch2",
    "parallel_llama_7b_4_h100_graph_batch2",
    "parallel_llama_7b_4_h200_graph_batch2",
    "parallel_llama_7b_4_h200_graph",
    "parallel_llama_7b_4_h200_graph_accumulated",
    "parallel_llama_7b_4_h200_graph_symmetric",
    "parallel_llama_13b_8layers_4_h200_graph",
    "parallel_llama_7b_4_h100_graph",
    "parallel_llama_7b_4_h100_graph_accumulation4",
    "parallel_llama_7b_4_h100_graph_accumulated",
    "parallel_llama_7b_4_h100_graph_wire_formats",
    "parallel_llama_13b_4_h100_graph_batch1",
    "parallel_llama_13b_8layers_4_h100",
    "parallel_llama_13b_8layers_4_h100_graph",
)
LIBRARY_ADAMW = 14  # bytes a parameter: weight, gradient and both moments in BF16; all but the gradient written, too
LEAN = ("+recipe=coat", "optim/master=bf16", "optim.in_backward=true", "max_grad_norm=0", "model=llama_7b")
FULL, AWAY = "model.recompute=full", ("optim.offload=true", "model.offload=true")
WHOLE = {  # docs/memory.md: settings, sequence, micro-batch, measured tokens/s
    "7B, recompute": ((*LEAN, FULL), 2048, 16, 16_516),
    "7B, FP4 forward": ((*LEAN, "precision=fp4_fold", "precision/saved_activations=coat"), 2048, 8, 17_483),
    "7B, offload": ((*LEAN, FULL, *AWAY), 1024, 8, 13_802),
    "7B, offload, one sequence": ((*LEAN, FULL, *AWAY), 1024, 1, 2_270),
}
NEAR = 0.15
MISSED = (
    "Why estimates are off: `fp4_mixed` was measured before amax of short lines became fast. With `7B, offload`",
    "kernels slow down beside copies, which the estimate does not count. The rate of BF16 GEMMs, attention, the",
    "time between kernels, the encoding of gradients, NVLink, the link to the host and the host's time per kernel and",
    "unit come from profiles of some of these steps; one number each serves all recipes. Nothing was taken from",
    "step_llama_7b_rotary_turn: its kernels were timed alone. The rates of an H100 come from these",
    "steps on four of them, so their rows show only that one set of rates serves all. Five of these are further off.",
    "Three have updates in the backward pass, whose time on the host is not counted: two were measured when the host",
    "launched an update and a collective for each matrix, one with one of each for a unit of two blocks. Two were",
    "measured when recipes with `comm=bf16` wrote gradients in FP32 and copied them, which estimates no longer count;",
    "so were all other steps of several GPUs but those of no_copy and graph. Steps with E4M3 gradients, but those of",
    "graph_wire_formats, were measured when these were written in FP32 (docs/results/h100x4.md).",
)
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Return every measured step once, from the first result that has it."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for name, model in STEPS.items():
        for row in _of_steps(name, model):
            if (row["step"], model) not in seen:
                seen.add((row["step"], model))
                yield row
    for name in PARALLEL:
        yield from _of_parallel(name)
    for name, (asked, length, batch, rate) in WHOLE.items():
        yield _row("memory", name, batch * length / rate * 1e3, _seconds(_run(asked, batch, length)))


def _of_parallel(name: str) -> Iterator[Row]:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    (device,) = (each for each in DEVICES.values() if each.name == found["environment"]["gpu"])
    given = {key: found["options"][key] for key in ("model", "batch", "seq_len", "micro_batches")}
    work = Work(**given, device=torch.device("cuda"), parameters="fp32")
    measured: dict[str, list[float]] = {}
    for row in found["rows"]:
        if "ms" in row and not row["name"].startswith(("plain", "torchao")):
            measured.setdefault(row["name"], []).append(row["ms"])
    for step, times in measured.items():
        run = Arm.parse(step).run(work, found["gpus"])
        yield _row(name, step, statistics.median(times), _seconds(run, found["gpus"], device=device), device)


def _of_steps(name: str, model: tuple[str, ...]) -> Iterator[Row]:
    found = json.loads((RESULTS / f"{name}.json").read_text())
    measured: dict[str, float] = {}
    for row in found["rows"]:
        measured.setdefault(row["name"], row["ms"])
    for row, ms in measured.items():
        recipe, _, rest = row.partition(" ")
        if recipe in ("plain", "torchao", "TE") or "head" in rest:
            continue
        yield _row(
            name, row, ms, _seconds(_run((f"+recipe={recipe}", *model), found["options"]["batch"]), library=not rest)
        )


def _run(asked: tuple[str, ...], batch: int, length: int = 2048) -> RunConfig:
    """Return the configuration of steps of `batch` sequences on one GPU."""
    return composed(*asked, f"micro_batch={batch}", f"data.seq_len={length}", f"tokens_per_step={batch * length}")


def _seconds(run: RunConfig, gpus: int = 1, *, library: bool = False, device: Device = H200) -> dict[str, float]:
    """library: with weights in BF16 and torch's AdamW, as `lowprec bench step` has them."""
    subject = Subject(run=run, gpus=gpus)
    times = step_time(subject, build.construct(run.comm, "comm"), device, weights_in=2 if library else None)
    if library:
        held = sum(math.prod(weight.shape) for weight in subject.weights)
        times["optimizer"] = LIBRARY_ADAMW * held / device.adamw["library"]
    return times


def _row(source: str, name: str, measured: float, seconds: dict[str, float], device: Device = H200) -> Row:
    estimated = 1e3 * sum(seconds.values())
    parts = {what: round(1e3 * value, 1) for what, value in seconds.items()}
    off = round(estimated / measured - 1, 4)
    return {
        "of": source,
        "GPU": device.name,
        "step": name,
        "ms": round(measured, 1),
        "estimated_ms": round(estimated, 1),
        "off": off,
    } | {"parts": parts}


def markdown(found: list[Row]) -> str:
    """Return the table."""
    parts = list(dict.fromkeys(part for row in found for part in row["parts"]))
    head = ["step", "of", "GPU", "measured ms", "estimated ms", "off", *parts]
    lines = table(
        head,
        (
            [row["step"], row["of"], row["GPU"].split()[1], number(row["ms"], 1), number(row["estimated_ms"], 1)]
            + [f"{row['off']:+.1%}"]
            + [number(row["parts"].get(part), 1) for part in parts]
            for row in found
        ),
    )
    within = sum(abs(row["off"]) <= NEAR for row in found)
    return "\n".join(
        [
            "Steps as they were measured, and as `lowprec estimate --device` computes them; of "
            f"{len(found)} steps {within} lie within 15 %.",
            "",
            "    python scripts/estimate_time.py",
            "",
            *lines,
            "",
            *MISSED,
            "",
        ]
    )


if __name__ == "__main__":
    made = list(rows())
    (RESULTS / "estimate_time.json").write_text(json.dumps({"rows": made}, indent=1) + "\n")
    (RESULTS / "estimate_time.md").write_text(markdown(made))
    print(markdown(made))
