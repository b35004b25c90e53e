"""A run is its directory: `<run_root>/<name>`, found again by the name alone.

    config.yaml    resolved configuration            metrics.jsonl   one line a step
    recipe.json    what every linear layer computes  checkpoints/    step-N, latest
    run.json       identity, corpus, deviations      telemetry.jsonl  a line a rounding, where it was watched
    DONE | PREEMPTED   how the last launch ended (JSON)

The default name is model-recipe-hash, the hash taken over the training keys only (`config.LAUNCH_FACTS` names the
others), so a requeued job continues and a changed learning rate is a new run. Nothing here deletes a run:
`resume=never` renames it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from lowprec_train.config import LAUNCH_FACTS, Resume
from lowprec_train.train.launch import first
from lowprec_train.train.sinks import RECIPE_GROUPS

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots; lists are values; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = dict(value) if isinstance(value, Mapping) else value
    return flat


def training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that decides what is learned, flat."""
    groups = tuple(f"{key}." for key in LAUNCH_FACTS)
    return {k: v for k, v in flatten(config).items() if k not in LAUNCH_FACTS and not k.startswith(groups)}


def digest(config: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the training keys."""
    return _hash(training_keys(config))


def comparison(config: Mapping[str, Any]) -> str:
    """`llama_tiny-1a2b3c4d`, the same for runs that differ in recipe and seed alone: what `lowprec compare` is for."""
    recipe = ("seed", *(f"{group}." for group in RECIPE_GROUPS))
    rest = {key: value for key, value in training_keys(config).items() if not key.startswith(recipe)}
    return f"{config['model']['name']}-{_hash(rest)}"


def _hash(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]


def default_name(config: Mapping[str, Any], recipe: str) -> str:
    """`llama_tiny-fp4-1a2b3c4d`."""
    return f"{config['model']['name']}-{recipe}-{digest(config)}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per training key that differs, with both values."""
    old, new = training_keys(saved), training_keys(now)
    keys = [*new, *(key for key in old if key not in new)]
    pairs = [(key, _shown(old, key), _shown(new, key)) for key in keys]
    return [f"{key}: saved {before}, now {after}" for key, before, after in pairs if before != after]


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "(absent)"


class RunDirectory:
    """A run directory held by one process: the claim is a lock, which ends with the process, however it ends.

    Other processes of the run have it without a lock: they read, and what they are asked to write, the holder writes.
    """

    def __init__(self, path: Path, lock: IO[str] | None, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self.saved = self.read("run.json")
        self._lock = lock

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
        """Write `name` (.yaml, else JSON) whole or not at all."""
        text = (
            OmegaConf.to_yaml(OmegaConf.create(dict(content)))
            if name.endswith(".yaml")
            else json.dumps(content, indent=2)
        )
        partial = self.path / f".{name}.partial"
        partial.write_text(text + "\n")
        os.replace(partial, self.path / name)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; empty when it does not exist."""
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else {}

    def begin(self, *, config: Mapping[str, Any], recipe: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """The run goes on, an earlier PREEMPTED no longer holds. With config.yaml, written last, the run exists."""
        if not self.held:
            return
        self.write("recipe.json", recipe)
        self.write("run.json", facts)
        self.write("config.yaml", config)
        (self.path / "PREEMPTED").unlink(missing_ok=True)

    def end(self, outcome: str, *, step: int, signal: str | None) -> None:
        """Say how the launch ended: DONE with the last losses, or PREEMPTED with the signal."""
        if not self.held:
            return
        if outcome == "preempted":
            self.write("PREEMPTED", {"step": step, "signal": signal})
        else:
            self.write("DONE", {"step": step, **_last_losses(self.path / "metrics.jsonl")})

    def release(self) -> None:
        """Give the claim up; a directory in which no run began goes with it."""
        if self._lock is None:
            return
        self._lock.close()
        if not (self.path / "config.yaml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()


def _last_losses(metrics: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in metrics.read_text().splitlines():
        values = json.loads(line)
        found |= {name: values[name] for name in ("train/loss", "valid/loss") if name in values}
    return found


def claim(root: Path, name: str, config: Mapping[str, Any], resume: Resume) -> RunDirectory:
    """The directory of run `name`, new or to be continued, for this process alone.

    Raises ValueError for an unusable name, a run that another process holds, and, unless `resume` is never, a saved
    configuration with other training keys.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"name={name!r} cannot name a directory: letters, digits and _ . = + - only")
    path = root / name
    lock = _lock(path)
    if (path / "config.yaml").exists():
        if resume is Resume.auto:
            _same(path, config)
            return RunDirectory(path, lock, resumed=True)
        path.rename(_aside(path))
        lock.close()
        lock = _lock(path)
    return RunDirectory(path, lock, resumed=False)


def shared(root: Path, name: str, config: Mapping[str, Any], resume: Resume) -> RunDirectory:
    """`claim` by rank 0 for all processes of the run; raises on all of them what it raises there."""
    claims: list[RunDirectory] = []

    def claimed() -> tuple[Path, bool, dict[str, Any]]:
        claims.append(claim(root, name, config, resume))
        return claims[0].path, claims[0].resumed, claims[0].saved

    path, resumed, saved = first(claimed)
    if claims:
        return claims[0]
    directory = RunDirectory(path, None, resumed)
    directory.saved = saved
    return directory


def _same(path: Path, config: Mapping[str, Any]) -> None:
    saved = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    assert isinstance(saved, dict)
    changed = differences({str(key): value for key, value in saved.items()}, config)
    if changed:
        lines = "\n".join(f"  {line}" for line in changed)
        raise ValueError(
            f"run {path.name!r} in {path.parent} was started with another configuration:\n{lines}\n"
            f"Choose another name=..., or resume=never to move the earlier run to {_aside(path).name} and start afresh."
        )


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


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
