"""The run directory `<run_root>/<name>`.

    config.yaml    resolved configuration            metrics.jsonl   one line a step
    recipe.json    what every linear layer computes  checkpoints/    step-N, latest
    run.json       identity, corpus, deviations      telemetry.jsonl  one line per observed rounding, with telemetry
    DONE | PREEMPTED | DIVERGED   how the last launch ended (JSON)

train/identity.py defines the identity of a run. This module deletes no run: `resume=never` renames it.
"""

import fcntl
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from lowprec_train.config import Resume, read_object, read_yaml
from lowprec_train.data.appending import write_whole
from lowprec_train.train import renamed_keys
from lowprec_train.train.checkpoint_folder import aside, steps, sync
from lowprec_train.train.digests import CheckpointError
from lowprec_train.train.identity import differences, longer
from lowprec_train.train.launch import first

log = logging.getLogger(__name__)

EVALUATION = "evaluation.json"  # losses of the finished run, of `lowprec study`
RESTORE = "restore it, or use resume=never to move the run aside and start again"
ENDED = "it only records how the last launch ended: remove it to continue from the last checkpoint"
_UNREADABLE = {"DONE": ENDED, "PREEMPTED": ENDED, "DIVERGED": ENDED}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


class RunDirectory:
    """A run directory that one process holds with a lock, which ends with the process.

    Other processes of the run have it without the lock: they read, and only the holder writes.
    """

    def __init__(
        self, path: Path, lock: IO[str] | None, config: Mapping[str, Any] | None = None, earlier: Path | None = None
    ) -> None:
        """config: with which the run was last started; None: it is new. earlier: new path of an earlier run with this
        name, which was moved aside.
        """
        self.path = path
        self.resumed = config is not None
        self.config: Mapping[str, Any] = config or {}
        self.saved = self.read("run.json")
        self._lock, self._earlier = lock, earlier

    @property
    def held(self) -> bool:
        """Whether this process holds the lock and writes."""
        return self._lock is not None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "DONE").exists()

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `name` (.yaml, else JSON) atomically and sync it to disk."""
        as_yaml = name.endswith(".yaml")
        text = OmegaConf.to_yaml(OmegaConf.create(dict(content))) if as_yaml else json.dumps(content, indent=2)
        write_whole(self.path / name, f"{text}\n".encode())
        sync(self.path)

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run; empty if it does not exist. Raises ValueError if it is not an object."""
        return read_object(self.path / name, advice=_UNREADABLE.get(name, RESTORE))

    def begin(self, *, config: Mapping[str, Any], recipe: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the files of the run, and remove PREEMPTED and DIVERGED of an earlier launch. config.yaml is written
        last: with it the run exists.
        """
        if not self.held:
            return
        self.write("recipe.json", recipe)
        self.write("run.json", facts)
        self.write("config.yaml", config)
        for mark in ("PREEMPTED", "DIVERGED"):
            (self.path / mark).unlink(missing_ok=True)

    def end(self, outcome: str, *, step: int, signal: str | None) -> None:
        """Record how the launch ended: DONE with the last losses, PREEMPTED with the signal, or DIVERGED."""
        if not self.held:
            return
        if outcome == "preempted":
            self.write("PREEMPTED", {"step": step, "signal": signal})
        elif outcome == "diverged":
            self.write("DIVERGED", {"step": step})
        else:
            lines = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
            losses = {name: line[name] for line in lines for name in ("train/loss", "valid/loss") if name in line}
            self.write("DONE", {"step": step, **losses})

    def release(self) -> None:
        """Release the lock. If no run has started, remove the directory and move an earlier run back."""
        if self._lock is None:
            return
        self._lock.close()
        if not (self.path / "config.yaml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()
                if self._earlier is not None:
                    self._earlier.rename(self.path)


def claim(root: Path, name: str, config: Mapping[str, Any], resume: Resume) -> RunDirectory:
    """Lock the directory of run `name`, new or to be continued, for this process.

    Raises ValueError for an invalid name, for a run that another process holds, and for a saved configuration with
    other training keys, unless `resume` is never.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"name={name!r} cannot name a directory; use only letters, digits and _ . = + -")
    path = root / name
    lock = _lock(path)
    begun = (path / "config.yaml").exists()
    if not begun and not (remains := _remains(path)):
        return RunDirectory(path, lock)
    if resume is Resume.never:
        earlier = path.rename(aside(path))
        lock.close()
        return RunDirectory(path, _lock(path), earlier=earlier)
    if not begun:
        raise ValueError(f"run {name!r} in {root} has {remains} but no config.yaml; {RESTORE}")
    saved = _configuration(path / "config.yaml")
    _check_same(path, saved, config, resume)
    return RunDirectory(path, lock, saved)


def _remains(path: Path) -> str:
    """Return which results of a run a directory has; "" for none."""
    with suppress(CheckpointError):
        found = [f"checkpoints ({', '.join(map(str, there))})"] if (there := steps(path / "checkpoints")) else []
        found += [name for name in ("metrics.jsonl", "DONE", "PREEMPTED", "DIVERGED") if (path / name).exists()]
        return " and ".join(found)
    return "checkpoints that cannot be read"


def _configuration(file: Path) -> dict[str, Any]:
    """Read a run's config.yaml. Raises ValueError, with the path, if it is invalid."""
    try:
        saved: Any = OmegaConf.to_container(read_yaml(file))
    except ValueError as error:
        raise ValueError(f"{error}; {RESTORE}") from error
    if not isinstance(saved.get("model"), dict):
        raise ValueError(f"{file} is not the configuration of a run; {RESTORE}")
    renamed_keys.refuse(saved, f"{file}", "use resume=never to move the run aside and start again, or another name=...")
    for key in ("steps", "checkpoint_interval", "log_interval"):
        if not isinstance(saved.get(key, None if key == "steps" else 1), int):
            raise ValueError(f"{file} has {key}: {saved.get(key)}, which is not a number of steps; {RESTORE}")
    return {str(key): value for key, value in saved.items()}


def shared(root: Path, name: str, config: Mapping[str, Any], resume: Resume) -> RunDirectory:
    """Call `claim` on rank 0 for all processes of the run; raise its error on all of them."""
    claims: list[RunDirectory] = []

    def claimed() -> tuple[Path, Mapping[str, Any] | None, dict[str, Any]]:
        claims.append(claim(root, name, config, resume))
        held = claims[0]
        return held.path, held.config if held.resumed else None, held.saved

    path, begun, saved = first(claimed)
    if claims:
        return claims[0]
    directory = RunDirectory(path, None, begun)
    directory.saved = saved
    return directory


def _check_same(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], resume: Resume) -> None:
    changed, length = differences(saved, now), longer(saved, now)
    if not changed or (length and resume in (Resume.extend, Resume.step)):
        return
    most = changed if len(changed) <= 4 else [*changed[:3], f"and {len(changed) - 3} more"]
    lines = "\n".join(f"  {line}" for line in most)
    more = length and now["steps"] > saved["steps"]
    further = f"; resume=extend continues to step {now['steps']} (docs/resuming.md)" if more else ""
    raise ValueError(
        f"run {path.name!r} in {path.parent} was started with another configuration:\n{lines}\n"
        f"Choose another name=..., or use resume=never to move the earlier run to {aside(path).name} and start again"
        f"{further}."
    )


def _lock(path: Path) -> IO[str]:
    """Lock a directory with a record lock: children do not inherit it, and it ends with the process."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = (path / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot use run directory {path}: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise ValueError(f"run {path.name!r} in {path.parent} is in use by another process") from error
    except OSError as error:
        log.warning("%s: this file system has no locks (%s); do not start a run twice", path, error.strerror)
    return file
