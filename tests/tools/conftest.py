"""Run directories as a trainer leaves them, with losses that the test chose."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

TOKENS_PER_STEP = 4096


def write(
    directory: Path,
    losses: Sequence[float],
    *,
    first: int = 1,
    tokens_per_step: int = TOKENS_PER_STEP,
    rate: float = 1000.0,
    valid: dict[int, float] | None = None,
    tail: str = "",
    config: str = "",
    done: bool = True,
    **info: Any,
) -> Path:
    """One run; `info` are entries of run.json, `tail` is added to metrics.jsonl as it is."""
    directory.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, start=first):
        line = {"step": step, "train/loss": loss, "data/tokens": step * tokens_per_step, "train/skipped": 0}
        line |= {"perf/tokens_per_sec_per_gpu": rate + (step % 3 - 1), "mem/peak_gib": 1 + step / 1000}
        line |= {"valid/loss": valid[step]} if valid and step in valid else {}
        lines.append(json.dumps(line) + "\n")
    (directory / "metrics.jsonl").write_text("".join(lines) + tail, encoding="utf-8")
    name = directory.name
    facts = {"name": name, "recipe": name, "model": "llama_tiny", "corpus_hash": "c0ffee", "deviations": []}
    facts |= {"overrides": [], "valid_unigram_entropy": 6.0} | info
    (directory / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (directory / "config.yaml").write_text(
        f"name: {name}\nseed: 1\nprecision: {{name: {name}}}\n{config}", encoding="utf-8"
    )
    if done:
        (directory / "DONE").write_text(json.dumps({"step": first + len(losses) - 1}))
    return directory


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("fp4", losses, ...)` writes a run below the test's own folder."""
    return lambda name, losses, **options: write(tmp_path / "runs" / name, losses, **options)
