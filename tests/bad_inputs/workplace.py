"""What the bad inputs are tried on: text, a tokenizer, a prepared set, finished runs, and an exported model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bad_inputs.case import ON_SOURCES, ON_TEXT

WORDS = ("loss", "scale", "tile", "token", "block", "codes", "draws", "layer", "model", "train", "valid", "epoch")


def write_text(root: Path) -> None:
    """corpus/: 20 modules; lines.jsonl: 40 documents; valid.jsonl: 4."""
    (root / "corpus").mkdir(parents=True)
    for number in range(20):
        lines = [f"def {WORDS[i * number % 12]}_{i}(x): return x * {i * 7 + number}" for i in range(40)]
        (root / "corpus" / f"module_{number}.py").write_text("\n".join(lines))
    texts = [(root / "corpus" / f"module_{number % 20}.py").read_text() + str(number) for number in range(44)]
    lines = [json.dumps({"text": text, "number": number}) for number, text in enumerate(texts)]
    (root / "lines.jsonl").write_text("\n".join(lines[:40]) + "\n")
    (root / "valid.jsonl").write_text("\n".join(lines[40:]) + "\n")


COMMANDS: tuple[list[str], ...] = (
    ["train", *ON_SOURCES, "name=good"],
    ["train", *ON_SOURCES, "+recipe=fp8", "name=fp8"],
    ["train", *ON_TEXT, "data.train=lines.jsonl", "name=text"],
    ["lowprec", "train-tokenizer", "lines.jsonl", "--vocab-size", "384", "--out", "tokenizer.model"],
    [
        "lowprec",
        *["prepare-data", "lines.jsonl", "--tokenizer", "tokenizer.model", "--out", "sets/lines", "--workers", "0"],
    ],
    ["lowprec", "export-hf", "runs/good", "--out", "exported"],
    ["lowprec", "import-hf", "exported", "--out", "imported"],
)
"""Run one after another in the directory that `write_text` has filled."""
