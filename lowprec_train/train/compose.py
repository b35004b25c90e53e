"""The configuration of `train.py` as a value: composed by Hydra with overrides, without a command line."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.config import RunConfig


def composed(*overrides: str) -> RunConfig:
    """What `train.py` with these overrides would run. Raises Hydra's errors, as ValueError."""
    config.register()
    try:
        with initialize_config_dir(str(config.directory()), version_base="1.3"):
            run = OmegaConf.to_object(compose("train", overrides=list(overrides)))
    except Exception as error:
        raise ValueError(str(error)) from error
    assert isinstance(run, RunConfig)
    return run
