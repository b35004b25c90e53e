"""The identity of a run: its training keys, the name made from them, and the differences from an earlier run.

Training keys are the keys that change the result of training; `config.LAUNCH_FACTS` lists the others. The default name
is model-recipe-hash, so a requeued job continues its run and a changed learning rate starts a new run. The hash is
computed before the data is opened and includes only the last part of data paths: `./a`, `a` and `/data/a` are the same.
The corpus hash alone decides whether a run continues with the data that it started with, wherever that data is stored.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowprec_train.config import PLACES, Resume, is_launch_fact, read_object
from lowprec_train.train.logging.sinks import RECIPE_GROUPS

NEUTRAL: dict[str, Any] = {  # newer keys, at the values that reproduce runs from before they existed
    "model.norm_placement": "pre",
    "optim.in_backward": False,
    "optim.grad_accumulation": {},
    **dict.fromkeys(("model.norm_backend", "optim.backend"), "own"),
    **dict.fromkeys(("model.head_dim", "model.qkv_bias", "model.rope_scaling", "comm.node_size")),
}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings; keys are joined by dots. Lists and empty mappings stay values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = dict(value) if isinstance(value, Mapping) else value
    return flat


def training_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a resolved configuration that decide the result of training, flat. Keys of `NEUTRAL` at these
    values are left out, so that a run which started before they existed has the same keys.
    """
    flat = flatten(config)
    left_out = {*PLACES, *(key for key, value in NEUTRAL.items() if key in flat and flat[key] == value)}
    keys = {k: v for k, v in flat.items() if k not in left_out and not is_launch_fact(k)}
    return keys | {"weights": _here(keys["weights"])} if isinstance(keys.get("weights"), str) else keys


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training keys and the last part of each data path."""
    flat = flatten(config)
    return training_keys(config) | {key: _last_part(flat[key]) for key in PLACES if flat.get(key) is not None}


def _last_part(place: Any) -> Any:
    """Return the name of a path; a list of one path counts as the path. The weights of a blend are kept."""
    if isinstance(place, list | tuple):
        return _last_part(place[0]) if len(place) == 1 else [_last_part(each) for each in place]
    return Path(place).expanduser().absolute().name if isinstance(place, str) else place


def _here(path: str) -> str:
    """Return a path relative to the working directory if it lies below it, else the absolute path."""
    whole = os.path.abspath(os.path.expanduser(path))
    below = os.path.relpath(whole)
    return whole if below.startswith(os.pardir) else below


def digest(config: Mapping[str, Any]) -> str:
    """Return the hash of a run: eight hexadecimal digits of its identity."""
    return _hash(identity(config))


def family(config: Mapping[str, Any]) -> str:
    """Return a hash that is the same for runs which differ in length only."""
    return _hash({key: value for key, value in identity(config).items() if not _of_horizon(key)})


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.json's facts of a run's identity. keys: hash of the training keys without data paths."""
    keys = _hash(training_keys(config))
    return {"hash": digest(config), "family": family(config), "keys": keys, "steps": config["steps"]}


def refuse_twin(root: Path, name: str, config: Mapping[str, Any], corpus_hash: str) -> None:
    """Raise ValueError if an existing run has the configuration and the corpus of an unnamed new one, but another name:
    its data was moved, or its path is written differently.
    """
    keys, made = _hash(training_keys(config)), name.rpartition("-")[0]
    for each, saved in runs(root).items():
        if each.rpartition("-")[0] == made and (saved.get("keys"), saved.get("corpus_hash")) == (keys, corpus_hash):
            raise ValueError(
                f"run {each} in {root} has the same configuration and the same data under another path; use "
                f"name={each} to continue it, or another name=... to train a second run"
            )


def _of_horizon(key: str) -> bool:
    """Return whether a key may change when a run is extended."""
    return key == "steps" or key.startswith("optim.schedule.")


def comparison(config: Mapping[str, Any]) -> str:
    """Return `llama_tiny-1a2b3c4d`, the same for runs that differ in recipe and seed only, for `lowprec compare`."""
    recipe = ("seed", *(f"{group}." for group in RECIPE_GROUPS))
    rest = {key: value for key, value in identity(config).items() if not key.startswith(recipe)}
    return f"{config['model']['name']}-{_hash(rest)}"


def _hash(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]


def default_name(config: Mapping[str, Any], recipe: str) -> str:
    """Return the name of a run without name=...: `llama_tiny-fp4-1a2b3c4d`."""
    return f"{config['model']['name']}-{recipe}-{digest(config)}"


def found_name(root: Path, config: Mapping[str, Any], recipe: str, resume: Resume) -> str:
    """Return the name of a run without name=...: the default name, or that of a run which was extended to these
    training keys. With `extend`: the name of the only run that differs in length only.

    Raises ValueError for `extend` if there is no such run, or more than one.
    """
    name = default_name(config, recipe)
    if (root / name / "config.yaml").exists():
        return name
    made = f"{config['model']['name']}-{recipe}-"
    saved = {each: facts for each, facts in runs(root).items() if each.startswith(made)}
    same = [each for each, facts in saved.items() if facts.get("hash") == digest(config)]
    if same:
        return same[0]
    if resume is not Resume.extend:
        return name
    related = [each for each, facts in saved.items() if facts.get("family") == family(config)]
    if len(related) == 1:
        return related[0]
    found = f"several runs in {root} differ in length only: {', '.join(related)}" if related else ""
    raise ValueError(f"resume=extend: {found or f'no run in {root} differs in length only'}; choose one with name=...")


def runs(root: Path) -> dict[str, dict[str, Any]]:
    """Return run.json of each run in a directory, by name. Runs that were moved aside are left out, and files that
    cannot be read: the run's own launch reports those.
    """
    found = {}
    for file in sorted(root.glob("*/run.json")):
        with suppress(OSError, ValueError):
            facts_of_run = read_object(file)
            if facts_of_run.get("name") == file.parent.name:
                found[file.parent.name] = facts_of_run
    return found


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per training key that differs, with both values."""
    old, new = training_keys(saved), training_keys(now)
    keys = [*new, *(key for key in old if key not in new)]
    pairs = [(key, _shown(old, key), _shown(new, key)) for key in keys]
    return [f"{key}: saved {before}, now {after}" for key, before, after in pairs if before != after]


def longer(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the configurations differ only in the length of the run and its schedule."""
    lines = differences(saved, now)
    return bool(lines) and all(_of_horizon(line.split(":")[0]) for line in lines)


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "(absent)"
