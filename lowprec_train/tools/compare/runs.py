"""Read a run from its directory, whether it is finished, stopped or still running.

`metrics.jsonl` has one JSON object per line: a `step` and any numbers. Its writer may be killed at any byte, so an
incomplete line is skipped and reported. If a resumed run logged a step again, the later values replace the earlier
ones, metric by metric. NaN (also from `null`) and infinity are kept: they are results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from lowprec_train import json_schema
from lowprec_train.config import read_object, read_yaml
from lowprec_train.json_schema import FINITE, TEXT, WHOLE, Listed
from lowprec_train.train.identity import flatten

LOSS = "train/loss"
VALID = "valid/loss"
TOKENS = "data/tokens"
INCOMPLETE = "incomplete"  # status of a finished run whose metrics.jsonl lacks its end
INFO = {
    "deviations?": Listed(TEXT),
    "overrides?": Listed(TEXT),
    "device?": TEXT,
    "tokenizer?": TEXT,
    "parameters?": WHOLE,
}
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric: `values[i]` (float64) was logged at `steps[i]` (int64, increasing)."""

    steps: Array
    values: Array


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run directory in memory. label: the name in reports, unique among the runs that are read together. status:
    done, preempted, diverged, unfinished or INCOMPLETE.
    """

    path: Path
    label: str
    recipe: str
    model: str
    corpus_hash: str
    unigram_entropy: float | None
    deviations: tuple[str, ...]
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    metrics: Mapping[str, Series]
    status: str
    notes: tuple[str, ...]
    device: str | None = None  # from run.json; None if absent

    def series(self, metric: str) -> Series:
        """Return the metric; empty if it was never logged."""
        return self.metrics.get(metric, Series(steps=np.array([], int), values=np.array([], float)))

    @property
    def loss(self) -> Series:
        """The training loss; empty if a run diverged before it logged one."""
        return self.series(LOSS)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs that can be compared: at least two different ones on the same corpus.

    Directories of earlier reports and of studies among `paths` are ignored, so that `runs/*` continues to work.

    Raises ValueError with the directory and the wrong value.
    """
    paths = [path for path in paths if (path / "metrics.jsonl").exists() or not _is_of_a_tool(path)]
    if len(paths) < 2:
        raise ValueError(f"needs at least two runs, got {len(paths)}: {', '.join(map(str, paths)) or 'none'}")
    for i, path in enumerate(paths):
        if path.resolve() in [earlier.resolve() for earlier in paths[:i]]:
            raise ValueError(f"the same run is given twice: {path}")
    infos = [read_info(path) for path in paths]
    runs = [read_run(path, info, label) for path, info, label in zip(paths, infos, labels(paths, infos))]
    for run in runs:
        if not len(run.loss.steps):
            raise ValueError(f"no metrics (no {LOSS} in {run.path / 'metrics.jsonl'})")
    for run in runs[1:]:
        if run.corpus_hash != runs[0].corpus_hash:
            raise ValueError(
                "runs on different corpora cannot be compared: "
                f"{runs[0].label} has corpus hash {runs[0].corpus_hash}, {run.label} has {run.corpus_hash}"
            )
    return runs


def _is_of_a_tool(path: Path) -> bool:
    """Return whether `lowprec compare` wrote its report here, or `lowprec study` has its studies here."""
    return (path / "report.json").is_file() or any(path.glob("*/seeds.json"))


def labels(paths: Sequence[Path], infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the run names, or paths for runs that share a name."""
    names = [str(info.get("name") or path.resolve().name) for path, info in zip(paths, infos)]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]


def read_info(path: Path) -> dict[str, Any]:
    """Return the content of `run.json`. Raises ValueError if `path` is not a run directory."""
    if not path.is_dir():
        raise ValueError(f"no such run directory: {path}")
    source = path / "run.json"
    if not source.is_file():
        raise ValueError(f"not a run directory (no run.json): {path}")
    info = read_object(source)
    if not info.get("corpus_hash"):
        raise ValueError(f"{source} has no corpus_hash, so it is not known whether the runs saw the same data")
    if wrong := json_schema.fault(info, INFO):
        raise ValueError(f"{source}: {wrong}; restore it")
    return info


def read_run(path: Path, info: Mapping[str, Any], label: str) -> Run:
    """Read the rest of a run directory whose `run.json` is `info`. Raises ValueError if no loss was logged, unless the
    run diverged, which is a result.
    """
    status = next((mark.lower() for mark in ("DIVERGED", "DONE", "PREEMPTED") if (path / mark).exists()), "unfinished")
    logged = status != "diverged" or (path / "metrics.jsonl").is_file()
    metrics, notes = read_metrics(path / "metrics.jsonl") if logged else ({}, [])
    if LOSS not in metrics and status != "diverged":
        raise ValueError(f"no metrics (no {LOSS} in {path / 'metrics.jsonl'})")
    if status == "done" and (lost := lost_end(path, metrics[LOSS])):
        status, notes = INCOMPLETE, [*notes, lost]
    entropy = info.get("valid_unigram_entropy")
    if entropy is not None and not FINITE.holds(entropy):
        raise ValueError(f"{path / 'run.json'}: valid_unigram_entropy is {entropy!r}, not a number")
    return Run(
        path=path,
        label=label,
        recipe=str(info.get("recipe") or "unknown"),
        model=str(info.get("model") or "unknown"),
        corpus_hash=str(info["corpus_hash"]),
        unigram_entropy=None if entropy is None else float(entropy),
        deviations=tuple(map(str, info.get("deviations") or ())),
        overrides=tuple(map(str, info.get("overrides") or ())),
        device=str(info["device"]) if info.get("device") else None,
        config=read_config(path / "config.yaml"),
        metrics=metrics,
        status=status,
        notes=tuple(notes),
    )


def lost_end(path: Path, loss: Series) -> str | None:
    """Return that metrics.jsonl ends before the finished run `path`; None if it does not. Raises ValueError, with the
    path, if DONE has no step.
    """
    done, last = path / "DONE", int(loss.steps[-1])
    ended: Any = read_object(done).get("step")
    if not WHOLE.holds(ended):
        raise ValueError(f"{done}: step is {ended!r}, not a whole number; restore it")
    if last >= ended:  # the last step is always logged
        return None
    return f"metrics.jsonl ends at step {last}, but the run ended at step {ended}: lines are missing"


def read_config(source: Path) -> dict[str, Any]:
    """Return the configuration of a run with dotted keys. Lists are values; empty dictionaries are left out."""
    if not source.is_file():
        raise ValueError(f"not a run directory (no config.yaml): {source.parent}")
    tree: Any = OmegaConf.to_container(read_yaml(source))
    return {key: value for key, value in flatten(tree).items() if value != {}}


def read_metrics(source: Path) -> tuple[dict[str, Series], list[str]]:
    """Return all series of a metrics.jsonl, and notes about skipped and repeated lines."""
    if not source.is_file():
        raise ValueError(f"no metrics (no metrics.jsonl): {source.parent}")
    rows: dict[int, dict[str, float]] = {}
    broken, repeated = [], 0
    for number, line in enumerate(read_lines(source), start=1):
        if not line.strip():
            continue
        record = parse(line)
        if record is None:
            broken.append(number)
            continue
        step, values = record
        row = rows.setdefault(step, {})
        repeated += LOSS in values and LOSS in row
        row.update(values)
    notes = []
    if broken:
        notes.append(f"unreadable lines of metrics.jsonl are left out: {', '.join(map(str, broken))}")
    if repeated:
        notes.append(f"{repeated} steps were logged again after a resume; the last values are used")
    return columns(rows), notes


def read_lines(source: Path) -> list[str]:
    """Return the lines of a file, which may end in the middle of a line or of a character."""
    return source.read_bytes().decode("utf-8", errors="replace").split("\n")


def parse(line: str) -> tuple[int, dict[str, float]] | None:
    """Return (step, metrics) of one line; None if the line is incomplete."""
    try:
        record = json.loads(line)
        return int(record.pop("step")), {k: float("nan") if v is None else float(v) for k, v in record.items()}
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
        return None


def columns(rows: Mapping[int, Mapping[str, float]]) -> dict[str, Series]:
    """Turn one row per step into one series per metric."""
    steps = sorted(rows)
    found: dict[str, Series] = {}
    for metric in dict.fromkeys(metric for step in steps for metric in rows[step]):
        at = [step for step in steps if metric in rows[step]]
        found[metric] = Series(steps=np.array(at, int), values=np.array([rows[step][metric] for step in at], float))
    return found
