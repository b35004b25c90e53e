"""The runs of a study in training order: block after block, seed after seed.

All arms of a seed come before the next seed, so a study that ends early has complete blocks of fewer seeds. The
name of a run, and so its directory, is made from its arm, setting and seed: the same command finds earlier runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.config import RunConfig, read_yaml
from lowprec_train.tools.study.definition import Arm, Block, Fork, Study, key_of
from lowprec_train.train import build, checks
from lowprec_train.train.compose import composed
from lowprec_train.train.identity import differences, flatten

OF_STATE: tuple[str, ...] = (
    "model.",
    "data.",
    "tokens_per_step",
    "optim.rule",
)  # keys that decide what a checkpoint holds
OF_STATE += ("optim.first_moment.", "optim.second_moment.", "optim.master.")
KEPT = 1000  # checkpoints of a trunk: all
TRUNK_KEYS = ("checkpoint_interval", "checkpoint_keep")
SHOWN = 4  # keys of a configuration that is not the planned one


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run. setting: the value of each axis. repeat: another run has the same arm, setting and seed.

    fork, trunk: a forked run starts from the state of the run `trunk` at step `fork.step`. A trunk has `fork` but no
    `trunk`.
    """

    name: str
    arm: str
    seed: int
    purpose: str
    setting: tuple[tuple[str, Any], ...]
    overrides: tuple[str, ...]
    repeat: bool = False
    fork: Fork | None = None
    trunk: str | None = None

    @property
    def is_trunk(self) -> bool:
        """Whether other runs fork from this one."""
        return self.fork is not None and self.trunk is None

    @property
    def cell(self) -> str:
        """Name of the comparison that the run belongs to: its setting and its fork."""
        parts = [f"{key}={written(value)}" for key, value in self.setting]
        return ", ".join(parts + ([f"from step {self.fork.step} of {self.fork.arm}"] if self.fork else []))

    def command(self, out: Path) -> list[str]:
        """Overrides of the `lowprec train` command that trains the run."""
        return [*self.overrides, f"seed={self.seed}", f"name={self.name}", f"run_root={out}"]


def runs(study: Study) -> list[StudyRun]:
    """Return all runs in order, each once. Raises ValueError if two different runs have the same name.

    A trunk that several blocks share is a repeat if any of them has its arm.
    """
    found: dict[str, StudyRun] = {}
    for block in study.blocks:
        for run in _of_block(study, block):
            other = found.get(run.name, run)
            if apart := set(run.overrides) ^ set(other.overrides):
                raise ValueError(f"study {study.name}: two runs would be named {run.name}: {', '.join(sorted(apart))}")
            found[run.name] = replace(other, repeat=other.repeat or run.repeat)
    return list(found.values())


def _of_block(study: Study, block: Block) -> Iterator[StudyRun]:
    for seed in block.seeds:
        for values in product(*block.axes.values()):
            setting = tuple(zip(block.axes, values, strict=True))
            each = [_run(study, study.arms[arm], block, seed, setting) for arm in block.arms]
            if block.fork:
                yield (trunk := _trunk(_run(study, study.arms[block.fork.arm], block, seed, setting), block))
                each = [_forked(run, block.fork, trunk) for run in each]
            yield from each
            yield from (replace(run, name=f"{run.name}-again", repeat=True) for run in each if run.arm in block.again)


def _trunk(run: StudyRun, block: Block) -> StudyRun:
    """Return the run that others fork from. It also trains to the end, as a repeat of its own fork."""
    assert block.fork
    saves = (f"{key}={value}" for key, value in zip(TRUNK_KEYS, (block.fork.step, KEPT), strict=True))
    name = run.name.removesuffix(f"-s{run.seed}") + f"-trunk{block.fork.step}-s{run.seed}"
    overrides = _last(*run.overrides, *saves)
    return replace(run, name=name, overrides=overrides, fork=block.fork, repeat=run.arm in block.arms)


def _forked(run: StudyRun, fork: Fork, trunk: StudyRun) -> StudyRun:
    name = run.name.removesuffix(f"-s{run.seed}") + f"-from{fork.step}-s{run.seed}"
    return replace(run, name=name, fork=fork, trunk=trunk.name)


def _run(study: Study, arm: Arm, block: Block, seed: int, setting: tuple[tuple[str, Any], ...]) -> StudyRun:
    axes = [f"{key}={written(value)}" for key, value in setting]
    label = "".join(f"-{key.rpartition('.')[2]}_{written(value)}" for key, value in setting)
    return StudyRun(
        name=f"{arm.name}{label}-s{seed}",
        arm=arm.name,
        seed=seed,
        purpose=block.purpose,
        setting=setting,
        overrides=_last(f"+recipe={arm.recipe}", *study.overrides, *arm.overrides, *axes),
    )


def written(value: Any) -> str:
    """Format a value for an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _last(*overrides: str) -> tuple[str, ...]:
    """Drop overrides that a later override of the same key replaces."""
    kept = {key_of(text): text for text in overrides}
    return tuple(text for text in overrides if kept[key_of(text)] == text)


def check_used(overrides: Sequence[str], planned: Iterable[StudyRun]) -> None:
    """Raises ValueError if a run replaces one of the overrides that were added for all runs with its own.

    Of overrides of one key the last counts, as for Hydra. How often a trunk saves follows from its forks.
    """
    for text, run in product(_last(*overrides), planned):
        key, own = key_of(text), run.overrides
        for other in own[own.index(text) + 1 :] if text in own else own:
            above = key_of(other)  # a group such as optim leaves its keys to other overrides
            if other == text or (run.is_trunk and above in TRUNK_KEYS):
                continue
            if key == above or (key.startswith(f"{above}.") and not (config.directory() / above).is_dir()):
                raise ValueError(f"--set {text}: {run.name} has {other}; change it in a copy of the study")


def check(study: Study, planned: Sequence[StudyRun]) -> dict[str, RunConfig]:
    """Compose and check every arm under every setting before training; return one configuration of each, by run name.

    Raises ValueError with the arm and the error of `train.py`.
    """
    first: dict[tuple[str, str, bool], str] = {}
    configured: dict[str, RunConfig] = {}
    named = {run.name: run for run in planned}
    laid_out: set[str] = set()
    for run in planned:
        if first.setdefault((run.arm, run.cell, run.trunk is None), run.name) != run.name:
            continue
        try:
            made = configured[run.name] = configuration(run)
            _check_layout(made, laid_out)
            if run.fork:
                _check_fork(run, made, named)
        except ValueError as error:
            where = f" ({run.cell})" if run.cell else ""
            raise ValueError(f"study {study.name}, arm {run.arm}{where}: {error}") from None
    return configured


def configuration(run: StudyRun, out: Path = Path("runs")) -> RunConfig:
    """Compose and check the configuration of a run. Raises ValueError if `lowprec train` would refuse it."""
    made = composed(*run.command(out))
    if made.data.get("seed", run.seed) != run.seed:
        raise ValueError(f"data.seed={made.data['seed']} does not follow seed: a block varies all draws together")
    checks.configuration(made)
    checks.nodes(made)
    return made


def _check_layout(made: RunConfig, laid_out: set[str]) -> None:
    """Check tiles against shapes, once for arms with equal shapes."""
    parts = (made.model, made.precision, made.micro_batch, made.data["seq_len"], made.parallel, made.steps)
    shape = repr(parts)
    if shape not in laid_out:
        build.layout(made)
        laid_out.add(shape)


def check_text(study: Study, configured: Mapping[str, RunConfig]) -> None:
    """Open the text of every arm once, and prepare it if needed, before several runs would do so at the same time.

    Raises ValueError if a text is missing.
    """
    opened: set[str] = set()
    for name, made in configured.items():
        node = repr({key: value for key, value in made.data.items() if key != "seed"})
        if node not in opened:
            opened.add(node)
            try:
                build.corpus(made)
            except (ValueError, OSError) as error:
                raise ValueError(f"study {study.name}, run {name}: {error}") from None


def _check_fork(run: StudyRun, made: RunConfig, named: Mapping[str, StudyRun]) -> None:
    """Check that the run can load the state of its trunk."""
    assert run.fork
    if run.fork.step >= made.steps:
        raise ValueError(f"fork.step={run.fork.step} must be below steps={made.steps}")
    if run.trunk is None:
        return
    own, other = (flatten(plain(each)) for each in (made, configuration(named[run.trunk])))
    for key in (key for key in {**own, **other} if key.startswith(OF_STATE)):
        if own.get(key) != other.get(key):
            raise ValueError(f"{key}={own.get(key)}, and {run.fork.arm}, from which it forks, has {other.get(key)}")
    clips, of_trunk = (bool(each["optim.in_backward"] and each["max_grad_norm"]) for each in (own, other))
    if clips and not of_trunk:
        raise ValueError(
            f"optim.in_backward=true clips by the norms of the step before, which {run.fork.arm}, from which it forks, "
            "does not store; give the arm max_grad_norm=0"
        )


def plain(made: RunConfig) -> dict[str, Any]:
    """Return a configuration as it is written to config.yaml."""
    tree = OmegaConf.to_container(OmegaConf.structured(made), resolve=True, enum_to_str=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def saved_form(run: StudyRun, out: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml, composed once for all seeds."""
    made = _composed(run.overrides)
    data = made["data"] | ({"seed": run.seed} if "seed" in made["data"] else {})
    return {**made, "data": data, "seed": run.seed, "name": run.name, "run_root": str(out)}


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    return plain(composed(*overrides, "seed=0", "name=study"))


def check_same(planned: Iterable[StudyRun], out: Path) -> None:
    """Raises ValueError if a run in the folder was trained with another configuration than the plan."""
    for run in planned:
        saved = OmegaConf.to_container(read_yaml(out / run.name / "config.yaml"))
        assert isinstance(saved, dict)
        lines = differences({str(key): value for key, value in saved.items()}, saved_form(run, out))
        if lines:
            more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
            raise ValueError(
                f"{out / run.name} was trained with another configuration than this study plans:\n  "
                + "\n  ".join(lines[:SHOWN])
                + f"{more}\nGive the --set of the command that trained it, or another --out."
            )
