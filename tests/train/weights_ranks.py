"""Four processes at dp 2 x tp 2 begin with given weights, train one step, and save.

Usage: weights_ranks.py START DIRECTORY, START as `open_weights` takes it. Rank 0 leaves the whole parameters before and
after the step, gathered by DTensor, in DIRECTORY/truth.pt, the checkpoint in DIRECTORY/run. Each rank leaves in
DIRECTORY/refused-RANK.txt what a save says once one of them has lost two numbers.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build, describe
from lowprec_train.train.checkpoint import Checkpointer, CheckpointError
from lowprec_train.train.launch import World
from lowprec_train.train.trainer import Trainer
from lowprec_train.train.weights import check_sizes, open_weights
from tests.parallel.runs import MICRO, SEQ, TINY, Walks
from tests.recipes import composed
from tests.train.standins import Corpus

CPU, SIZES = torch.device("cpu"), Sizes(dp_shard=2, tp=2)
MODEL = ("model=llama_tiny", "model.kv_heads=2", *TINY, "+recipe=bf16", "optim/master=bf16")


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter, gathered."""
    state = trainer.checkpoint_parts()["model"].state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def work(rank: int, start: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=SIZES.processes)
    run = composed(*MODEL, f"tokens_per_step={2 * MICRO * SEQ}", "parallel.dp_shard=2", "parallel.tp=2")
    laid_out, first = build.layout(run), open_weights(Path(start))
    check_sizes(run.model, first)
    laid_out.model.dtype = torch.float32
    distribution = build.distribution(run, laid_out, World(rank, SIZES.processes, rank), CPU)
    linears = [describe.effective(laid_out.model, phase.recipes, CPU) for phase in laid_out.phases]
    text = Corpus(Walks(), Walks())
    trainer = build.trainer(run, laid_out, linears, text, distribution, CPU, compiled=False, first=first)
    before = whole(trainer)
    trainer.step()
    after, path = whole(trainer), Path(directory) / "run"
    saver = Checkpointer(path / "checkpoints", interval=1, keep=1, process_group=dist.new_group(backend="gloo"))
    saver.save(trainer.checkpoint_parts(), 1, wait=True)
    if rank == 0:
        torch.save({"before": before, "after": after}, Path(directory) / "truth.pt")
        OmegaConf.save(OmegaConf.create({"model": asdict(run.model)}), path / "config.yaml")
    (Path(directory) / f"refused-{rank}.txt").write_text(refused(trainer, saver, rank))
    dist.destroy_process_group()


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


if __name__ == "__main__":
    mp.start_processes(work, args=tuple(sys.argv[1:]), nprocs=SIZES.processes, start_method="fork")
