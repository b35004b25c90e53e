"""The result of a benchmark: environment, options and rows, stored as JSON."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lowprec_train.tools.bench import fields, report
from lowprec_train.train import describe

Result = dict[str, Any]
PACKAGES = ("triton", "torchao", "transformer_engine")


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Return the machine and versions that the numbers depend on, and the command that repeats the measurement."""
    found: dict[str, Any] = {"gpu": describe.device_name(device), **describe.versions()}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found | installed() | {"platform": platform.machine(), "command": shlex.join(command)}


def installed() -> dict[str, str]:
    """Return the versions of the installed packages among `PACKAGES`."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cause(error: BaseException) -> str:
    """Return an error in one line, for a row of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def save(result: Result, directory: Path, name: str) -> list[Path]:
    """Write `<name>.json` and its table, `<name>.md`; return both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.json", directory / f"{name}.md"]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(report.markdown(result), encoding="utf-8")
    return paths


def load(path: Path) -> Result:
    """Read a result. Raises ValueError for a file that is not a whole result of `lowprec bench`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or str(result.get("bench")) not in report.TABLES:
        raise ValueError(f"{path} is not a result of `lowprec bench`")
    if fault := fields.fault(result):
        raise ValueError(f"{path} is not a complete result of `lowprec bench {result['bench']}`: {fault}")
    return result
