"""The run directory: `<run_root>/<name>`, found by the name alone.

    config.yaml    resolved configuration            metrics.jsonl   one line a step
    recipe.json    what every linear layer computes  checkpoints/    step-N, latest
    run.json       identity, corpus, deviations      telemetry.jsonl  a line a rounding, where it was watched
    DONE | PREEMPTED | DIVERGED   how the last launch ended (JSON)

train/identity.py defines the identity of a run. Nothing here deletes a run: `resume=never` renames it.
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

RESTORE = "restore it, or resume=never moves the run aside and starts afresh"
ENDED = "it only says how the last launch ended: remove it, and the run goes on from its last checkpoint"
_UNREADABLE = {"DONE": ENDED, "PREEMPTED": ENDED, "DIVERGED": ENDED}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


class RunDirectory:
    """A run directory held by one process: the claim is a lock, which ends with the process, however it ends.

    Other processes of the run have it without a lock: they read, and what they are asked to write, the holder writes.
    """

    def __init__(
        self, path: Path, lock: IO[str] | None, config: Mapping[str, Any] | None = None, earlier: Path | None = None
    ) -> None:
        """config: that the run was last started with; None: it is a new one. earlier: where the run was moved to that
        had this name.
        """
        self.path = path
        self.resumed = config is not None
        self.config: Mapping[str, Any] = config or {}
        self.saved = self.read("run.json")
        self._lock, self._earlier = lock, earlier

    @property
    def held(self) -> bool:
        """Whether this process is the one that writes."""
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
        """Write `name` (.yaml, else JSON) whole or not at all; it is on disk when this returns."""
        as_yaml = name.endswith(".yaml")
        text = OmegaConf.to_yaml(OmegaConf.create(dict(content))) if as_yaml else json.dumps(content, indent=2)
        write_whole(self.path / name, f"{text}\n".encode())
        sync(self.path)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; empty when it does not exist. ValueError when it holds no object; names the file."""
        return read_object(self.path / name, advice=_UNREADABLE.get(name, RESTORE))

    def begin(self, *, config: Mapping[str, Any], recipe: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """The run goes on, an earlier PREEMPTED or DIVERGED no longer holds. With config.yaml, written last, the run
        exists.
        """
        if not self.held:
            return
        self.write("recipe.json", recipe)
        self.write("run.json", facts)
        self.write("config.yaml", config)
        for mark in ("PREEMPTED", "DIVERGED"):
            (self.path / mark).unlink(missing_ok=True)

    def end(self, outcome: str, *, step: int, signal: str | None) -> None:
        """Say how the launch ended: DONE with the last losses, PREEMPTED with the signal, or DIVERGED."""
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
        """Give the claim up; a directory in which no run began goes with it, and the run that made room comes back."""
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
    """The directory of run `name`, new or to be continued, for this process alone.

    Raises ValueError for an unusable name, a run that another process holds, and, unless `resume` is never, a saved
    configuration with other training keys.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"name={name!r} cannot name a directory: letters, digits and _ . = + - only")
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
    _same(path, saved, config, resume)
    return RunDirectory(path, lock, saved)


def _remains(path: Path) -> str:
    """What a directory has that a run has made; "" for none."""
    with suppress(CheckpointError):
        found = [f"checkpoints ({', '.join(map(str, there))})"] if (there := steps(path / "checkpoints")) else []
        found += [name for name in ("metrics.jsonl", "DONE", "PREEMPTED", "DIVERGED") if (path / name).exists()]
        return " and ".join(found)
    return "checkpoints that cannot be read"


def _configuration(file: Path) -> dict[str, Any]:
    """A run's config.yaml. ValueError when it is none; names the file."""
    try:
        saved: Any = OmegaConf.to_container(read_yaml(file))
    except ValueError as error:
        raise ValueError(f"{error}; {RESTORE}") from error
    if not isinstance(saved.get("model"), dict):
        raise ValueError(f"{file} is no configuration of a run; {RESTORE}")
    renamed_keys.refuse(saved, f"{file}", "resume=never moves the run aside and starts afresh, another name=... too")
    for key in ("steps", "checkpoint_interval", "log_interval"):
        if not isinstance(saved.get(key, None if key == "steps" else 1), int):
            raise ValueError(f"{file} has {key}: {saved.get(key)}, which is no number of steps; {RESTORE}")
    return {str(key): value for key, value in saved.items()}


def shared(root: Path, name: str, config: Mapping[str, Any], resume: Resume) -> RunDirectory:
    """`claim` by rank 0 for all processes of the run; raises on all of them what it raises there."""
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


def _same(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any], resume: Resume) -> None:
    changed, length = differences(saved, now), longer(saved, now)
    if not changed or (length and resume in (Resume.extend, Resume.step)):
        return
    most = changed if len(changed) <= 4 else [*changed[:3], f"and {len(changed) - 3} more"]
    lines = "\n".join(f"  {line}" for line in most)
    more = length and now["steps"] > saved["steps"]
    further = f"; resume=extend goes on to step {now['steps']} (docs/resuming.md)" if more else ""
    raise ValueError(
        f"run {path.name!r} in {path.parent} was started with another configuration:\n{lines}\n"
        f"Choose another name=..., or resume=never to move the earlier run to {aside(path).name} and start afresh"
        f"{further}."
    )


def _lock(path: Path) -> IO[str]:
    """A record lock: it is not inherited by children and ends with the process, SIGKILL included."""
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
        log.warning("%s: this file system has no locks (%s); start a run once only", path, error.strerror)
    return file
