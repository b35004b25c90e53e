"""Begin a run with the state of another one: weights, optimizer, position in the data, lines of metrics.jsonl.

The new run directory is one that the trainer would have left after that step under the new configuration, so the
trainer goes on with it by itself, and reads and compares every byte of the checkpoint as ever. Files of the checkpoint
are links to those of the trunk: nobody changes them in place. `fork.json` holds a digest of the checkpoint's manifest,
which has a checksum of every 32 MiB: forks whose digests are equal began bit-equal (`check_start`).
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

from lowprec_train.config import read_object
from lowprec_train.train import checkpoint_folder as folder
from lowprec_train.train.digests import FILE as MANIFEST
from lowprec_train.train.logging.sinks import read_lines

FILE = "fork.json"


def fork(trunk: Path, run: Path, step: int, config: Mapping[str, Any]) -> None:
    """Make the run directory `run` from that of a trunk after `step` steps, unless it is there. Whole or not at all.

    config: resolved, of the new run. ValueError where the trunk has no such checkpoint.
    """
    if run.exists():
        return
    source = folder.path_of(trunk / "checkpoints", step)
    if not (source / MANIFEST).is_file():
        there = folder.listed(trunk / "checkpoints")
        raise ValueError(
            f"{trunk} has no checkpoint step-{step} to fork from; {there}; remove {trunk}, and it is trained again"
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


def digest(checkpoint: Path) -> str:
    """SHA-256 of the checksums of all its files."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def start_state(run: Path) -> dict[str, Any]:
    """Content of a fork's fork.json; empty for a run that is no fork."""
    return read_object(run / FILE)


def check_start(starts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError if forks of one run did not begin with the same bits. starts: `start_state` by name of run."""
    forks = {name: start for name, start in starts.items() if start}
    for trunk in {start["trunk"] for start in forks.values()}:
        found = {start["checkpoint"]: name for name, start in forks.items() if start["trunk"] == trunk}
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found.values())} did not begin with the same state of {trunk}")
