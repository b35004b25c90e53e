"""STUDY.yaml: the arms, seeds and contrasts of a study.

An arm is a recipe with overrides. A block lists which arms train on which seeds, for one purpose:

    gate      measure the noise and fix the set-up before the comparison
    sweep     choose a value, such as the learning rate of each arm
    estimate  compare the arms

A run that chose a setting does not judge it: estimates that reuse such runs are biased by up to 0.010 nat. So a seed
has one purpose in a study, and no estimate uses a seed of the studies that it comes `after`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.train.command_line import meant
from lowprec_train.train.construct import check_arguments

SHIPPED = Path(__file__).parent / "shipped"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+]*")
VALUE = re.compile(r"[A-Za-z0-9_.+-]+")
OWN_KEYS = ("seed", "data.seed", "name", "run_root", "resume", "device", "weights")  # of the blocks and the launch


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A recipe with overrides, applied after those of the study. predicted: expected gap to the baseline in percent,
    which the report shows beside the measured one.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    predicted: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Every run of a block starts from the state of this arm after `step` steps."""

    arm: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Arms that train on the same seeds. axes: configuration key -> values, used in all combinations. again: arms that
    are trained twice on each seed, which measures the noise of the machine.
    """

    purpose: Literal["gate", "sweep", "estimate"]
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    axes: Mapping[str, tuple[Any, ...]]
    again: tuple[str, ...] = ()
    fork: Fork | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """Content of STUDY.yaml.

    contrasts: pairs (arm, other arm), named before the results are known. after: files of studies that chose settings
    of this study. keep_checkpoints: keep those of finished runs (1.6 GB a run at 130M parameters).
    """

    name: str
    arms: Mapping[str, Arm]
    blocks: tuple[Block, ...]
    overrides: tuple[str, ...] = ()
    baseline: str = "bf16"
    contrasts: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()
    keep_checkpoints: bool = True

    @property
    def seeds(self) -> dict[int, str]:
        """Purpose of each seed."""
        return {seed: block.purpose for block in self.blocks for seed in block.seeds}

    def with_overrides(self, overrides: Sequence[str]) -> Study:
        """Add overrides for all runs. Raises ValueError for the seed, the recipe and what the launch decides."""
        _check_overrides("--set", overrides)
        return replace(self, overrides=(*self.overrides, *overrides))


def find(name: Path) -> Path:
    """Return the file of a study, given by path or shipped name. Raises ValueError if there is none."""
    if name.is_file():
        return name
    if str(name) in shipped():
        return SHIPPED / f"{name}.yaml"
    raise ValueError(f"no such study: {name} is no file and none of {', '.join(shipped())}")


def shipped() -> list[str]:
    """Return the names of the shipped studies."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(path: Path, later: tuple[Path, ...] = ()) -> Study:
    """Read and check a study. later: the studies that come after it. Raises ValueError with the file, the key and the
    value.
    """
    try:
        return _study(OmegaConf.to_container(config.read_yaml(path)), (*later, path))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def _study(content: Any, files: tuple[Path, ...]) -> Study:
    tree = _checked(Study, content, "study")
    _check_name(tree["name"], "study.name")
    _check_overrides("study.overrides", tree.get("overrides", ()))
    arms = {name: _arm(name, options or {}) for name, options in _mapping(tree["arms"], "arms").items()}
    _check_known(tree.get("baseline", "bf16"), arms, "study.baseline")
    for number, pair in enumerate(tree.get("contrasts", ())):
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ValueError(f"contrasts[{number}]: {list(pair)} must be two different arms")
        for name in pair:
            _check_known(name, arms, f"contrasts[{number}]")
    blocks = tuple(_block(each, f"blocks[{i}]", arms) for i, each in enumerate(tree["blocks"]))
    if not blocks:
        raise ValueError("blocks is empty: there is nothing to train")
    study = Study(**tree | {"arms": arms, "blocks": blocks})
    _check_seeds(study, files)
    return study


def _arm(name: str, options: Any) -> Arm:
    _check_name(name, "arms")
    place = f"arms.{name}"
    tree = _checked(Arm, {"recipe": name} | _mapping(options, place), place, supplied=("name",))
    _check_known(tree["recipe"], config.choices("recipe"), f"{place}.recipe")
    _check_overrides(f"{place}.overrides", tree.get("overrides", ()))
    if not math.isfinite(tree.get("predicted") or 0):
        raise ValueError(f"{place}.predicted={tree['predicted']} must be a finite number of percent")
    return Arm(name=name, **tree)


def _block(content: Any, place: str, arms: Mapping[str, Arm]) -> Block:
    tree = _checked(Block, {"arms": list(arms), "axes": {}} | _mapping(content, place), place)
    seeds = tree["seeds"]
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 1 << 63 for seed in seeds):
        raise ValueError(f"{place}.seeds: {list(seeds)} must be one or more seeds from 0 to 2^63 - 1, each once")
    for name in tree["arms"]:
        _check_known(name, arms, f"{place}.arms")
    for name in tree.get("again", ()):
        _check_known(name, tree["arms"], f"{place}.again")
    axes = {key: _axis(key, values, f"{place}.axes") for key, values in _mapping(tree["axes"], f"{place}.axes").items()}
    if tree.get("fork") is not None:
        tree["fork"] = Fork(**_checked(Fork, tree["fork"], f"{place}.fork"))
        _check_known(tree["fork"].arm, arms, f"{place}.fork.arm")
        if tree["fork"].step < 1:
            raise ValueError(f"{place}.fork.step={tree['fork'].step} must be at least 1")
    return Block(**tree | {"axes": axes})


def _axis(key: str, values: Any, place: str) -> tuple[Any, ...]:
    _check_overrides(place, [f"{key}="])
    if not isinstance(values, list) or not values:
        raise ValueError(f"{place}.{key}: {values!r} must be a list of one value or more")
    for value in values:
        if not VALUE.fullmatch(str(value)):
            raise ValueError(f"{place}.{key}: {value!r} cannot be part of a run's name: letters, digits, _ . + -")
    if len(set(values)) < len(values):
        raise ValueError(f"{place}.{key}: {values} must hold each value once")
    return tuple(values)


def _check_seeds(study: Study, files: tuple[Path, ...]) -> None:
    """Check that each seed has one purpose and was not used by an earlier study to choose a setting of this one.

    files: that of this study, which is the last, and those of the studies that come after it.
    """
    seen: dict[int, str] = {}
    for block in study.blocks:
        for seed in block.seeds:
            if seen.setdefault(seed, block.purpose) != block.purpose:
                raise ValueError(f"seed {seed} is for {seen[seed]} and for {block.purpose}: each has one purpose")
    for file in study.after:
        path = find(files[-1].parent / file)
        if path.resolve() in [each.resolve() for each in files]:
            raise ValueError(f"after: {file} comes after itself")
        earlier = load(path, files)
        for seed in (each for each, purpose in study.seeds.items() if purpose == "estimate" and each in earlier.seeds):
            raise ValueError(f"seed {seed} is an estimate seed, and {file}, which chose this setting, has used it")


def _check_overrides(place: str, overrides: Sequence[str]) -> None:
    for text in overrides:
        key = key_of(text)
        if "=" not in text:
            raise ValueError(f"{place}: {text!r} is no override: expected key=value")
        if key in OWN_KEYS or key.startswith("hydra"):
            raise ValueError(f"{place}: {text!r}: {key} is decided by the study's blocks and by the launch")
        if key == "recipe":
            raise ValueError(f"{place}: {text!r}: the recipe belongs to an arm")


def key_of(override: str) -> str:
    """Return the key of an override, without the plus signs or the tilde before it."""
    return override.partition("=")[0].lstrip("+~")


def _check_name(name: str, place: str) -> None:
    if not NAME.fullmatch(name):
        raise ValueError(f"{place}: {name!r} cannot be part of a directory's name: letters, digits and _ . + only")


def _check_known(name: str, known: Collection[str], place: str) -> None:
    if name not in known:
        guess = meant(name, known)
        suggestion = f"; did you mean {guess}?" if guess else ""
        raise ValueError(f"{place}: {name!r} is none of {', '.join(known)}{suggestion}")


def _checked(made: type, content: Any, place: str, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return keys and values that fit the fields of a dataclass, with tuples for lists."""
    tree = _mapping(content, place)
    check_arguments(made, tree, place, supplied)
    return {
        key: tuple(tuple(each) if isinstance(each, list) else each for each in value)
        if isinstance(value, list)
        else value
        for key, value in tree.items()
    }


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: {value!r} must be keys and values")
    return {str(key): each for key, each in value.items()}
