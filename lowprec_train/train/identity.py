"""The identity of a run: its training keys, the name made from them, and the differences from an earlier run.

Training keys are those that change what is learned; `config.LAUNCH_FACTS` names the others. The default name is
model-recipe-hash, so a requeued job continues and a changed learning rate is a new run. The hash is computed before the
text is opened, so it has only the last part of the paths of text: `./a`, `a` and `/data/a` are one. The corpus hash
alone decides whether a run continues with the text that it began with, wherever that text lies now.
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

NEUTRAL: dict[str, Any] = {  # keys that older runs do not have, at the values that mean what those computed
    "model.norm_placement": "pre",
    "optim.in_backward": False,
    "optim.grad_accumulation": {},
    **dict.fromkeys(("model.norm_backend", "optim.backend"), "own"),
    **dict.fromkeys(("model.head_dim", "model.qkv_bias", "model.rope_scaling", "comm.node_size")),
}


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
    """The part of a resolved configuration that decides what is learned, flat. Keys of `NEUTRAL` at these values are
    left out: a run that was begun without them is the same.
    """
    flat = flatten(config)
    left_out = {*PLACES, *(key for key, value in NEUTRAL.items() if key in flat and flat[key] == value)}
    keys = {k: v for k, v in flat.items() if k not in left_out and not is_launch_fact(k)}
    return keys | {"weights": _here(keys["weights"])} if isinstance(keys.get("weights"), str) else keys


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The training keys, and the last part of the paths where text lies."""
    flat = flatten(config)
    return training_keys(config) | {key: _last_part(flat[key]) for key in PLACES if flat.get(key) is not None}


def _last_part(place: Any) -> Any:
    """A path's name, as good as a list of it; a blend's weights stay."""
    if isinstance(place, list | tuple):
        return _last_part(place[0]) if len(place) == 1 else [_last_part(each) for each in place]
    return Path(place).expanduser().absolute().name if isinstance(place, str) else place


def _here(path: str) -> str:
    """A path from the working directory where it lies below it, else from the root."""
    whole = os.path.abspath(os.path.expanduser(path))
    below = os.path.relpath(whole)
    return whole if below.startswith(os.pardir) else below


def digest(config: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the identity."""
    return _hash(identity(config))


def family(config: Mapping[str, Any]) -> str:
    """The same for runs that differ in their length alone."""
    return _hash({key: value for key, value in identity(config).items() if not _of_horizon(key)})


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json says of a run's identity, beside its corpus. keys: of all but the places of its text."""
    keys = _hash(training_keys(config))
    return {"hash": digest(config), "family": family(config), "keys": keys, "steps": config["steps"]}


def refuse_twin(root: Path, name: str, config: Mapping[str, Any], corpus_hash: str) -> None:
    """Raise ValueError where an unnamed run would begin that there is by another name: its text was moved, or its path
    is spelled otherwise, a link say.
    """
    keys, made = _hash(training_keys(config)), name.rpartition("-")[0]
    for each, told in runs(root).items():
        if each.rpartition("-")[0] == made and (told.get("keys"), told.get("corpus_hash")) == (keys, corpus_hash):
            raise ValueError(
                f"run {each} in {root} has this configuration and this text, from another path; name={each} goes on "
                "with it, any other name=... trains a second one"
            )


def _of_horizon(key: str) -> bool:
    """Whether a key may change when a run is extended."""
    return key == "steps" or key.startswith("optim.schedule.")


def comparison(config: Mapping[str, Any]) -> str:
    """`llama_tiny-1a2b3c4d`, the same for runs that differ in recipe and seed alone: what `lowprec compare` is for."""
    recipe = ("seed", *(f"{group}." for group in RECIPE_GROUPS))
    rest = {key: value for key, value in identity(config).items() if not key.startswith(recipe)}
    return f"{config['model']['name']}-{_hash(rest)}"


def _hash(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]


def default_name(config: Mapping[str, Any], recipe: str) -> str:
    """`llama_tiny-fp4-1a2b3c4d`."""
    return f"{config['model']['name']}-{recipe}-{digest(config)}"


def found_name(root: Path, config: Mapping[str, Any], recipe: str, resume: Resume) -> str:
    """The name of an unnamed run: the default one, unless a run that was extended to these steps has these training
    keys. With `extend`, the name of the only run that differs in its length alone.

    Raises ValueError where there are several of these, or none.
    """
    name = default_name(config, recipe)
    if (root / name / "config.yaml").exists():
        return name
    made = f"{config['model']['name']}-{recipe}-"
    told = {each: facts for each, facts in runs(root).items() if each.startswith(made)}
    same = [each for each, facts in told.items() if facts.get("hash") == digest(config)]
    if same:
        return same[0]
    if resume is not Resume.extend:
        return name
    related = [each for each, facts in told.items() if facts.get("family") == family(config)]
    if len(related) == 1:
        return related[0]
    which = f"several: {', '.join(related)}; name=... chooses one" if related else "none; name=... names one"
    raise ValueError(f"resume=extend: of the runs in {root} that differ in their length alone there are {which}")


def runs(root: Path) -> dict[str, dict[str, Any]]:
    """run.json of the runs in a folder, by name, without those that were moved aside. One that cannot be read is left
    out: its own launch will say so.
    """
    found = {}
    for file in sorted(root.glob("*/run.json")):
        with suppress(OSError, ValueError):
            told = read_object(file)
            if told.get("name") == file.parent.name:
                found[file.parent.name] = told
    return found


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per training key that differs, with both values."""
    old, new = training_keys(saved), training_keys(now)
    keys = [*new, *(key for key in old if key not in new)]
    pairs = [(key, _shown(old, key), _shown(new, key)) for key in keys]
    return [f"{key}: saved {before}, now {after}" for key, before, after in pairs if before != after]


def longer(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether all that differs is the length of the run and its schedule."""
    lines = differences(saved, now)
    return bool(lines) and all(_of_horizon(line.split(":")[0]) for line in lines)


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "(absent)"
