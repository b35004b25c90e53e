"""The telemetry of a run as matrices, one per operand, with a row per layer and a column per logged step.

`telemetry.jsonl` has one JSON object per line (docs/telemetry.md). As in metrics, an incomplete line is skipped, and a
row that a resumed run logged again replaces the first. A statistic without a value (an exact rounding, non-finite data,
a clamp that the recipe does not have) is NaN.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.tools.compare.runs import Array, read_lines

FILE = "telemetry.jsonl"
GEMMS = ("fprop", "dgrad", "wgrad", "saved")
LABELS = {
    "sqnr_db": "SQNR, dB",
    "underflow_pct": "underflow, %",
    "saturated_pct": "saturated, %",
    "nonfinite_pct": "not finite, %",
    "amax": "log2 of the largest magnitude",
    "scale_min": "log2 of the smallest scale",
    "scale_max": "log2 of the largest scale",
    "scale_spread": "binades between scales",
    "outlier_pct": "outliers, %",
    "clamped_blocks_pct": "clamped blocks, %",
    "stalled_pct": "stalled updates, %",
}
LOGARITHMIC = ("amax", "scale_min", "scale_max")


@dataclass(frozen=True, kw_only=True)
class Map:
    """One map: values [layers, steps] of an operand ("fprop.a") or optimizer state, `name`; NaN for absent values."""

    name: str
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: Array


def read_rows(source: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a telemetry.jsonl; [] without such a file."""
    return [row for row in map(parse, read_lines(source)) if row] if source.is_file() else []


def parse(line: str) -> dict[str, Any] | None:
    """Return one row; None if the line is incomplete."""
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) and ("site" in row or "parameter" in row) else None
    except (ValueError, TypeError, KeyError):
        return None


def maps(rows: Sequence[Mapping[str, Any]], figure: str) -> list[Map]:
    """Return the maps of one statistic, by GEMM and operand, then by state; layers by name, block 10 after block 9."""
    cells: dict[str, dict[tuple[str, int], float]] = {}
    for row in (row for row in rows if row.get(figure) is not None):
        name = f"{row['gemm']}.{row['operand']}" if "site" in row else row["state"]
        value = float(row[figure])
        if figure in LOGARITHMIC:
            value = math.log2(value) if value > 0 else math.nan
        layer = row.get("site") or row["parameter"].removesuffix(".weight")
        cells.setdefault(name, {})[layer, row["step"]] = value
    steps = tuple(sorted({row["step"] for row in rows}))
    return [filled(name, cells[name], steps) for name in sorted(cells, key=place)]


def place(name: str) -> tuple[int, str]:
    gemm = name.split(".")[0]
    return (GEMMS.index(gemm) if gemm in GEMMS else len(GEMMS), name)


def filled(name: str, cells: Mapping[tuple[str, int], float], steps: tuple[int, ...]) -> Map:
    layers = tuple(sorted({layer for layer, _ in cells}, key=natural))
    row, column = ({key: i for i, key in enumerate(keys)} for keys in (layers, steps))
    values = np.full((len(layers), len(steps)), np.nan)
    for (layer, step), value in cells.items():
        values[row[layer], column[step]] = value
    return Map(name=name, layers=layers, steps=steps, values=values)


def natural(layer: str) -> list[tuple[bool, int, str]]:
    """Return a sorting key that compares numbers as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", layer)]
