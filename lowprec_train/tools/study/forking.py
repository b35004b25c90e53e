"""Starts a run from the state of another run: weights, optimizer, position in the data, lines of metrics.jsonl.

The new run directory is the one that the trainer would have written after that step under the new configuration, so the
trainer resumes it and verifies the checkpoint as usual. The files of the checkpoint are hard links to those of the run
that is forked (the trunk); they are never changed in place. `fork.json` holds a digest of the checkpoint's manifest,
which has a checksum for every 32 MiB: forks with equal digests started bit-equal (`check_start`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lowprec_train import json_schema
from lowprec_train.config import read_object
from lowprec_train.json_schema import TEXT, WHOLE
from lowprec_train.train import checkpoint_folder as folder
from lowprec_train.train.digests import FILE as MANIFEST
from lowprec_train.train.logging.sinks import read_lines

FILE = "fork.json"
START = "{} or an object with a text `trunk`, a whole number `step` and a text `checkpoint`"


def fork(trunk: Path, run: Path, step: int, config: Mapping[str, Any]) -> None:
    """Create the run directory `run`, atomically, from the trunk's state after `step` steps, unless it exists.

    config: resolved configuration of the new run. Raises ValueError if the trunk has no checkpoint of that step.
    """
    if run.exists():
        return
    source = folder.path_of(trunk / "checkpoints", step)
    if not (source / MANIFEST).is_file():
        there = folder.listed(trunk / "checkpoints")
        raise ValueError(
            f"{trunk} has no checkpoint step-{step} to fork from; {there}; remove {trunk} to train it again"
        )
    made = run.with_name(f".tmp-{run.name}")
    shutil.rmtree(made, ignore_errors=True)
    checkpoints = made / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copytree(source, folder.path_of(checkpoints, step), copy_function=os.link)
    folder.point_to(checkpoints, step)
    lines = [line for line in read_lines(trunk / "metrics.jsonl") if line["step"] <= step]
    (made / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    facts = read_object(trunk / "run.json") | {"name": run.name}
    (made / "run.json").write_text(json.dumps(facts, indent=2))
    start = {"trunk": trunk.name, "step": step, "checkpoint": digest(source)}
    (made / FILE).write_text(json.dumps(start, indent=2))
    (made / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))))
    made.rename(run)
    folder.sync(run.parent)


def saved(trunk: Path, step: int) -> bool:
    """Return whether a run in training has saved this step and logged a later one, so that it can be forked."""
    if not (folder.path_of(trunk / "checkpoints", step) / MANIFEST).is_file():
        return False
    metrics = trunk / "metrics.jsonl"
    return metrics.exists() and any(line["step"] > step for line in read_lines(metrics))


def digest(checkpoint: Path) -> str:
    """Return the SHA-256 of the checkpoint's manifest, which holds the checksums of all files."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def start_state(run: Path) -> dict[str, Any]:
    """Return the content of fork.json; empty if the run is not a fork. Raises ValueError for other content."""
    found = read_object(run / FILE)
    if not is_start_state(found):
        raise ValueError(f"{run / FILE} is {json.dumps(found)[:60]}, not {START}")
    return found


def is_start_state(value: Any) -> bool:
    """Return whether a value has the form of fork.json, or is empty."""
    return value == {} or not json_schema.fault(value, {"trunk": TEXT, "step": WHOLE, "checkpoint": TEXT})


def check_start(starts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError if forks of one trunk started from different bits. starts: run name -> `start_state`."""
    forks = {name: start for name, start in starts.items() if start}
    for trunk in {start["trunk"] for start in forks.values()}:
        found = {start["checkpoint"]: name for name, start in forks.items() if start["trunk"] == trunk}
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found.values())} did not begin with the same state of {trunk}")
