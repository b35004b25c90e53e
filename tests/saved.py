"""A run as it lies on disk, without having trained: what evaluation, generation and export read of one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from omegaconf import OmegaConf
from torch import nn

from lowprec_train.config import RunConfig
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.states import ModelState


def save(
    directory: Path, run: RunConfig, model: nn.Module, *steps: int, recipe: str = "bf16", tokenizer: Path | None = None
) -> Path:
    """The model as the checkpoint of each of these steps; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tree = {key: dataclasses.asdict(getattr(run, key)) for key in ("model", "precision")}
    OmegaConf.save(OmegaConf.create({"steps": run.steps, "data": run.data, **tree}), directory / "config.yaml")
    facts = {"recipe": recipe, "tokenizer": None if tokenizer is None else str(tokenizer)}
    (directory / "run.json").write_text(json.dumps(facts))
    saver = Checkpointer(directory / "checkpoints", interval=1, keep=9, asynchronous=False)
    for step in steps:
        saver.save({"model": ModelState(model)}, step)
    return directory
