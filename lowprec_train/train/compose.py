"""Compose the configuration of `train.py` with overrides, without a command line."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowprec_train import config
from lowprec_train.config import RunConfig
from lowprec_train.train.command_line import explained, one_line, refuse_flags, refuse_unknown


def composed(*overrides: str) -> RunConfig:
    """Return the configuration that `train.py` would run with these overrides. Raises Hydra's errors as ValueError."""
    config.register()
    try:
        with initialize_config_dir(str(config.directory()), version_base="1.3"):
            made = compose("train", overrides=list(overrides))
    except Exception as error:
        raise ValueError(explained(error, overrides)) from error
    return typed(made, overrides)


def typed(composed: DictConfig, overrides: Sequence[str]) -> RunConfig:
    """Convert a configuration that Hydra composed to the types of `config`. Raises ValueError if it does not fit."""
    refuse_unknown(composed)
    refuse_flags(overrides)
    try:
        _type_phases(composed)
        run = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error, overrides)) from error
    assert isinstance(run, RunConfig)
    return run


def _type_phases(run: DictConfig) -> None:
    """Give the phases of the precision schedule their types and all their keys."""
    phases = OmegaConf.to_container(run.precision.schedule, resolve=True)
    assert isinstance(phases, dict)
    for name, given in phases.items():
        run.precision.schedule[name] = config.phase(str(name), given)
