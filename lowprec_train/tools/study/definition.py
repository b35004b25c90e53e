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
from typing import Any

from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.train.command_line import meant

SHIPPED = Path(__file__).parent / "shipped"
PURPOSES = ("gate", "sweep", "estimate")
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

    purpose: str
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
    overrides: tuple[str, ...]
    baseline: str
    arms: Mapping[str, Arm]
    blocks: tuple[Block, ...]
    contrasts: tuple[tuple[str, str], ...] = ()
    after: tuple[Path, ...] = ()
    keep_checkpoints: bool = True

    @property
    def seeds(self) -> dict[int, str]:
        """Purpose of each seed."""
        return {seed: block.purpose for block in self.blocks for seed in block.seeds}

    def with_overrides(self, overrides: Sequence[str]) -> Study:
        """Add overrides for all runs. Raises ValueError for a key that the study sets itself."""
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


def load(path: Path) -> Study:
    """Read and check a study. Raises ValueError with the file, the key and the value."""
    try:
        return _study(_container(path), path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _container(path: Path) -> Mapping[str, Any]:
    tree = OmegaConf.to_container(config.read_yaml(path))
    if not isinstance(tree, dict):
        raise ValueError(f"holds {str(tree)[:40]!r}, not keys and values")
    return {str(key): value for key, value in tree.items()}


def _study(tree: Mapping[str, Any], folder: Path) -> Study:
    keys = ("name", "overrides", "baseline", "arms", "blocks", "contrasts", "after", "keep_checkpoints")
    _known(tree, keys, "")
    name = _named(tree.get("name"), "name")
    overrides = _texts(tree.get("overrides", []), "overrides")
    _check_overrides("overrides", overrides)
    arms = {arm.name: arm for arm in _arms(_mapping(tree.get("arms"), "arms"))}
    blocks = tuple(_block(each, f"blocks[{i}]", arms) for i, each in enumerate(_list(tree.get("blocks"), "blocks")))
    if not blocks:
        raise ValueError("blocks is empty: there is nothing to train")
    keep = tree.get("keep_checkpoints", True)
    if not isinstance(keep, bool):
        raise ValueError(f"keep_checkpoints: {keep!r} is neither true nor false")
    study = Study(
        name=name,
        overrides=overrides,
        baseline=_one_of(tree.get("baseline", "bf16"), arms, "baseline"),
        arms=arms,
        blocks=blocks,
        contrasts=_contrasts(_list(tree.get("contrasts", []), "contrasts"), arms),
        after=tuple(folder / text for text in _texts(tree.get("after", []), "after")),
        keep_checkpoints=keep,
    )
    _check_seeds(study)
    return study


def _arms(tree: Mapping[str, Any]) -> list[Arm]:
    found, recipes = [], config.choices("recipe")
    for key, value in tree.items():
        place = f"arms.{key}"
        name, options = _named(key, "arms"), _mapping(value or {}, place)
        _known(options, ("recipe", "overrides", "predicted"), f"{place}.")
        recipe = _one_of(options.get("recipe", key), recipes, f"{place}.recipe")
        overrides = _texts(options.get("overrides", []), f"{place}.overrides")
        _check_overrides(f"{place}.overrides", overrides)
        predicted = _percent(options.get("predicted"), f"{place}.predicted")
        found.append(Arm(name=name, recipe=recipe, overrides=overrides, predicted=predicted))
    return found


def _block(value: Any, place: str, arms: Mapping[str, Arm]) -> Block:
    tree = _mapping(value, place)
    _known(tree, ("purpose", "seeds", "arms", "axes", "again", "fork"), f"{place}.")
    purpose = _one_of(tree.get("purpose"), PURPOSES, f"{place}.purpose")
    seeds = tuple(_count(seed, f"{place}.seeds", least=0) for seed in _list(tree.get("seeds"), f"{place}.seeds"))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{place}.seeds: {list(seeds)} must be one seed or more, each once")
    chosen = tuple(_texts(tree.get("arms", list(arms)), f"{place}.arms"))
    again = tuple(_texts(tree.get("again", []), f"{place}.again"))
    for name in chosen:
        _one_of(name, arms, f"{place}.arms")
    for name in again:
        _one_of(name, chosen, f"{place}.again")
    axes = _axes(_mapping(tree.get("axes", {}), f"{place}.axes"), f"{place}.axes")
    return Block(
        purpose=purpose, seeds=seeds, arms=chosen, axes=axes, again=again, fork=_fork(tree.get("fork"), place, arms)
    )


def _axes(tree: Mapping[str, Any], place: str) -> dict[str, tuple[Any, ...]]:
    axes = {}
    for key, values in tree.items():
        _check_overrides(place, [f"{key}="])
        axes[key] = tuple(_list(values, f"{place}.{key}"))
        if not axes[key]:
            raise ValueError(f"{place}.{key}: {values} must be one value or more")
        for value in axes[key]:
            if not VALUE.fullmatch(str(value)):
                raise ValueError(f"{place}.{key}: {value!r} cannot be part of a run's name: letters, digits, _ . + -")
    return axes


def _fork(value: Any, place: str, arms: Mapping[str, Arm]) -> Fork | None:
    if value is None:
        return None
    tree = _mapping(value, f"{place}.fork")
    _known(tree, ("arm", "step"), f"{place}.fork.")
    arm = _one_of(tree.get("arm"), arms, f"{place}.fork.arm")
    return Fork(arm=arm, step=_count(tree.get("step"), f"{place}.fork.step", least=1))


def _contrasts(values: Sequence[Any], arms: Mapping[str, Arm]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for number, value in enumerate(values):
        pair = _texts(value, f"contrasts[{number}]")
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ValueError(f"contrasts[{number}]: {list(pair)} must be two different arms")
        pairs.append((_one_of(pair[0], arms, "contrasts"), _one_of(pair[1], arms, "contrasts")))
    return tuple(pairs)


def _check_seeds(study: Study) -> None:
    """Check that each seed has one purpose and was not used by an earlier study to choose a setting of this one."""
    seen: dict[int, str] = {}
    for block in study.blocks:
        for seed in block.seeds:
            if seen.setdefault(seed, block.purpose) != block.purpose:
                raise ValueError(f"seed {seed} is for {seen[seed]} and for {block.purpose}: each has one purpose")
    for file in study.after:
        earlier = load(find(file))
        for seed in (each for each, purpose in study.seeds.items() if purpose == "estimate" and each in earlier.seeds):
            raise ValueError(f"seed {seed} is an estimate seed, and {file.name}, which chose this setting, has used it")


def _check_overrides(place: str, overrides: Sequence[str]) -> None:
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        if "=" not in text:
            raise ValueError(f"{place}: {text!r} is no override: expected key=value")
        if key in OWN_KEYS or key.startswith("hydra"):
            raise ValueError(f"{place}: {text!r}: {key} is decided by the study's blocks and by the launch")
        if key == "recipe":
            raise ValueError(f"{place}: {text!r}: the recipe belongs to an arm")


def _known(tree: Mapping[str, Any], keys: Collection[str], above: str) -> None:
    for key in tree:
        if key not in keys:
            raise ValueError(f"there is no key {above}{key}{_asked(key, keys)}")


def _one_of(value: Any, known: Collection[str], place: str) -> str:
    if value not in known:
        raise ValueError(f"{place}: {value!r} is none of {', '.join(known)}{_asked(str(value), known)}")
    return str(value)


def _asked(name: str, known: Collection[str]) -> str:
    guess = meant(name, known)
    return f"; did you mean {guess}?" if guess else ""


def _named(value: Any, place: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{place}: {value!r} cannot be part of a directory's name: letters, digits and _ . + only")
    return value


def _count(value: Any, place: str, *, least: int) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{place}: {value!r} is not a whole number of at least {least}")
    return value


def _percent(value: Any, place: str) -> float | None:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError(f"{place}: {value!r} is no number of percent")
    return None if value is None else float(value)


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: {value!r} must be keys and values")
    return {str(key): each for key, each in value.items()}


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: {value!r} must be a list")
    return value


def _texts(value: Any, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{place}: {value!r} must be a list of texts")
    return tuple(value)
