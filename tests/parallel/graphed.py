"""Runs on GPUs whose steps are launched kernel by kernel, or recorded as a CUDA graph and repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lowprec_train.config import RunConfig
from lowprec_train.data.loader import Batch
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from lowprec_train.train.launch import ALONE, World
from lowprec_train.train.trainer import Trainer
from tests.parallel.runs import FIRST_AGAIN, IN_BACKWARD, MICRO, SEQ, SPLIT, SUMS, TINY, Walks
from tests.recipes import composed
from tests.train.standins import Corpus

STEPS = 12
EVALUATED = (2, 4, 10)  # 0-based steps that an evaluation follows: in the warm-up, and of repeated steps in each phase
LATER = "precision.schedule.end.at=0.5"
SENT = {  # only with several ranks
    "estimator": ("+recipe=fp4", "parallel.param_all_gather=quantized"),
    "zero2": ("+recipe=fp8", "parallel.reshard_after_forward=false"),
    "coded": ("+recipe=fp8", "parallel.param_all_gather=quantized", "comm=fp8"),
    "pairs": ("+recipe=fp8", "model.layers=3", "parallel.blocks_per_unit=2", "comm=bf16"),
    "each": ("+recipe=fp8", "parallel.grad_reduce=every_microbatch", "comm=bf16"),
}
CASES = {
    "bf16": ("+recipe=bf16", "comm=fp32"),
    "fp8": ("+recipe=fp8",),
    "coat": ("+recipe=coat",),
    "lean coat": ("+recipe=coat", "optim/master=bf16", IN_BACKWARD, "model.recompute=selective", "max_grad_norm=0.5"),
    "draws": ("+recipe=mxfp4",),
    "fp4": ("+recipe=fp4",),
    "phases": ("+recipe=fp4_mixed", LATER),
    "gpt": ("+recipe=fp8", "model=gpt_tiny"),
    "muon": ("+recipe=bf16", "optim=muon"),
    "document mask": ("+recipe=fp8", "data.document_mask=true"),
    "loss in chunks": ("+recipe=bf16", "model.loss_chunk=48"),
    "sums": ("+recipe=fp8", IN_BACKWARD, f"{SUMS}=e4m3", "+optim.grad_accumulation.stochastic=true"),
    "sums of shards": (
        "+recipe=fp8",
        IN_BACKWARD,
        f"{SUMS}=e4m3",
        *FIRST_AGAIN,
        "parallel.grad_reduce=every_microbatch",
    ),
    **SENT,
}


class Documents(Walks):
    """Each sequence is two documents, which meet at another token in each step."""

    def batch(self, step: int, first: int, count: int, per_step: int) -> Batch:
        made = super().batch(step, first, count, per_step)
        return replace(made, documents=(torch.arange(SEQ) > 8 + step).long().expand(count, SEQ).contiguous())


@dataclass(frozen=True)
class Job:
    """A run. Composed before processes are started."""

    run: RunConfig
    compiled: bool = False


def described(
    case: str, sizes: Sizes, *, graph: bool, accumulation: int = 1, compiled: bool = False, device: str = "cuda"
) -> Job:
    """A case at a layout."""
    tokens = MICRO * SEQ * sizes.dp * accumulation
    layout = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    grid = [f"parallel.{key}={value}" for key, value in layout.items()]
    words = (*TINY, *SPLIT, *CASES[case], *grid, f"tokens_per_step={tokens}", f"steps={STEPS}", f"device={device}")
    return Job(composed(*words, f"cuda_graph={str(graph).lower()}"), compiled)


def trained(job: Job, world: World = ALONE, device: torch.device | None = None) -> dict[str, Any]:
    """Losses, norms, evaluations, and the parameters after the last step. device: None: this rank's GPU."""
    trainer, found = built(job, world, device), {"loss": [], "norm": [], "valid": []}
    for step in range(STEPS):
        metrics = trainer.step()
        found["loss"].append(metrics["train/loss"])  # read at the end: no step overwrites an earlier one's
        found["norm"].append(metrics["train/grad_norm"])
        if step in EVALUATED:
            found["valid"].append(trainer.evaluate()["valid/loss"])
    trainer.passes.close()
    listed = {name: [float(each) for each in values] for name, values in found.items()}
    sent = trainer.data_parallel.metrics().get("comm/grad_bytes", 0.0)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trainer.model.parameters()]
    return listed | {"sent": float(sent), "parameters": [p.detach().cpu() for p in local]}


def built(job: Job, world: World, device: torch.device | None) -> Trainer:
    """Its trainer on the text of `runs.Walks`, or on documents of it."""
    if device is None:
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    laid_out = build.layout(job.run)
    distribution = build.distribution(job.run, laid_out, world, device)
    plans = laid_out.plans(device, shards=distribution.sizes.dp_shard)
    walks = Documents() if job.run.data.get("document_mask") else Walks()
    text = Corpus(walks, walks)
    return build.trainer(job.run, laid_out, plans, text, distribution, device, compiled=job.compiled)


def work(rank: int, pairs: dict[str, tuple[Job, Job]], processes: int) -> dict[str, tuple[Any, Any]]:
    """What each pair of jobs computes on this rank; in the place of a failure, its text."""
    world = World(rank, processes, rank)
    return {name: (trained(first, world), trained(second, world)) for name, (first, second) in pairs.items()}
