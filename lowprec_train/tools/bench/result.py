"""A measurement as a value: where it was made, with which options, and its rows. JSON is what is kept."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lowprec_train.tools.bench import report
from lowprec_train.train import describe

Result = dict[str, Any]
PACKAGES = ("triton", "torchao", "transformer_engine")


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions that the numbers depend on, and how to measure again."""
    found: dict[str, Any] = {"gpu": describe.device_name(device), **describe.versions()}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found | installed() | {"platform": platform.machine(), "command": shlex.join(command)}


def installed() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are there."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cause(error: BaseException) -> str:
    """One line of an error, for a row of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def save(result: Result, directory: Path, name: str) -> list[Path]:
    """`<name>.json` and the table made from it, `<name>.md`; returns both."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.json", directory / f"{name}.md"]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(report.markdown(result), encoding="utf-8")
    return paths


def load(path: Path) -> Result:
    """Raises ValueError for a file that no bench wrote."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(result, dict) or result.get("bench") not in report.TABLES:
        raise ValueError(f"{path} is no result of `lowprec bench`")
    return result
