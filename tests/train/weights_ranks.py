"""What a rank does at dp 2 x tp 2: begins with given weights, trains one step, saves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from lowprec_train.train.checkpoint import Checkpointer, CheckpointError
from lowprec_train.train.launch import World
from lowprec_train.train.trainer import Trainer
from lowprec_train.train.weights import check_sizes, fill_from, open_weights
from tests.parallel.runs import MICRO, SEQ, TINY, Walks
from tests.recipes import composed
from tests.train.standins import Corpus

CPU, SIZES = torch.device("cpu"), Sizes(dp_shard=2, tp=2)
MODEL = ("model=llama_tiny", "model.kv_heads=2", *TINY, "+recipe=bf16", "optim/master=bf16")


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter, gathered."""
    state = trainer.checkpoint_parts()["model"].state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def work(rank: int, start: Path, directory: Path) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """(the whole parameters before and after the step, gathered by DTensor; what a save says once a rank has lost two
    numbers). start: as `open_weights` takes it. The checkpoint is in directory/run.
    """
    run = composed(*MODEL, f"tokens_per_step={2 * MICRO * SEQ}", "parallel.dp_shard=2", "parallel.tp=2")
    laid_out, first = build.layout(run), open_weights(start)
    check_sizes(run.model, first)
    laid_out.model.dtype = torch.float32
    distribution = build.distribution(run, laid_out, World(rank, SIZES.processes, rank), CPU)
    plans = laid_out.plans(CPU)
    text = Corpus(Walks(), Walks())
    fill = fill_from(first, distribution.fill)
    trainer = build.trainer(run, laid_out, plans, text, distribution, CPU, compiled=False, fill=fill)
    before = whole(trainer)
    trainer.step()
    after, path = whole(trainer), directory / "run"
    saver = Checkpointer(path / "checkpoints", interval=1, keep=1, process_group=dist.new_group(backend="gloo"))
    saver.save(trainer.checkpoint_parts(), 1, wait=True)
    if rank == 0:
        OmegaConf.save(OmegaConf.create({"model": asdict(run.model)}), path / "config.yaml")
    return {"before": before, "after": after}, refused(trainer, saver, rank)


def refused(trainer: Trainer, saver: Checkpointer, rank: int) -> str:
    """What a save says after one rank has lost two numbers of its part of a weight, which only it can see."""
    if rank == 3:
        weight = trainer.model.state_dict()["blocks.1.mlp.down.weight"]
        assert isinstance(weight, DTensor)
        with torch.no_grad():
            weight.to_local().view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
    try:
        saver.save(trainer.checkpoint_parts(), 2, wait=True, only_finite=True)
    except CheckpointError as error:
        return str(error)
    return ""
