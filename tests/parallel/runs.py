"""Short runs of every recipe at one layout of processes: started once a layout, with all recipes looped inside.

Each rank returns {system: {"loss": [...], "norm": [...]}}.
The reference is one process with accumulation = dp and the same micro-batches: `trained(described(system, sizes))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowprec_train.config import RunConfig
from lowprec_train.data.loader import Batch
from lowprec_train.numerics.draws import Draws
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.recipes import mxfp4
from lowprec_train.train import build
from lowprec_train.train.launch import ALONE, World
from lowprec_train.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.precision.noise import weight_noise
from tests.recipes import BY_NIGHT, SYSTEMS, composed
from tests.train.standins import Corpus

CPU = torch.device("cpu")
STEPS, SEQ, MICRO, VOCAB = 3, 64, 2, 64
LAYOUTS = {
    "dp2": Sizes(dp_shard=2),
    "tp2": Sizes(tp=2),
    "dp2-tp2": Sizes(dp_shard=2, tp=2),
    "replicate2-shard2": Sizes(dp_replicate=2, dp_shard=2),
}
TINY = ("model.layers=2", f"model.vocab_size={VOCAB}", f"model.max_seq_len={SEQ}", f"data.seq_len={SEQ}")
TINY += (f"micro_batch={MICRO}", "eval_batches=3")
SPLIT = ("model.dim=256", "model.heads=8", "model.kv_heads=4", "model.ffn=768")  # over up to four tensor-parallel ranks
WIDE_HEADS = ("model.attention=qk_norm", "model.head_dim=64", "model.qkv_bias=true")
LATER = "precision.schedule.end.at=0.67"  # before the last of three steps
IN_BACKWARD = "optim.in_backward=true"
PAIRS = ("model.layers=3", "parallel.blocks_per_unit=2")  # the last unit has one block
LEAN = (IN_BACKWARD, "optim.offload=true", "model.recompute=full", "model.offload=true")
SUMS = "+optim/moment@optim.grad_accumulation"
E4M3_MOMENTUM = "optim/moment@optim.first_moment=e4m3"
FIRST_AGAIN = ("model.recompute=selective", "model.full_recompute_layers=1")
WEIGHTS_AGAIN = ("precision.override.recompute_weight_codes=true", "parallel.param_all_gather=bf16")
CASES = {name: (f"+recipe={name}", *SPLIT, "comm=fp32", "max_grad_norm=0") for name in SYSTEMS}
CASES["fp4_mixed"] += (LATER,)
RECIPES = tuple(name for name in CASES if name not in BY_NIGHT)
# A recipe of each kind of scale, draw and codec, and clipping by norms of earlier steps:
EVERYWHERE = ("bf16", "fp8", "fp8_lm", "coat", "fp4", "mxfp4", "nvfp4", "clipped in backward")
CASES |= {
    "gpt": ("+recipe=bf16", "model=gpt_tiny", "comm=fp32", "max_grad_norm=0"),
    "gpt fp8": ("+recipe=fp8", "model=gpt_tiny", "comm=fp32", "max_grad_norm=0"),
    "clipped": ("+recipe=fp8", *SPLIT, "comm=fp32", "max_grad_norm=0.1"),
    "each": ("+recipe=fp8", *SPLIT, "comm=fp32", "max_grad_norm=0", "parallel.grad_reduce=every_microbatch"),
    "lean coat": ("+recipe=coat", *SPLIT, "comm=fp32", "max_grad_norm=0", *LEAN),
    "masters in bf16": ("+recipe=coat", *SPLIT, "comm=fp32", "max_grad_norm=0", "optim/master=bf16", IN_BACKWARD),
    "clipped in backward": ("+recipe=coat", *SPLIT, "comm=fp32", "max_grad_norm=0.1", IN_BACKWARD),
    "masters in fp16": ("+recipe=fp8", *SPLIT, "comm=fp32", "max_grad_norm=0", "optim/master=fp16"),
    "loss in chunks": ("+recipe=bf16", *SPLIT, "comm=fp32", "max_grad_norm=0", "model.loss_chunk=48"),
    "gpt loss in chunks": ("+recipe=bf16", "model=gpt_tiny", "comm=fp32", "max_grad_norm=0", "model.loss_chunk=48"),
    "pairs": ("+recipe=fp8", *SPLIT, *PAIRS, "comm=fp32", "max_grad_norm=0"),
    "lean pairs": ("+recipe=coat", *SPLIT, *PAIRS, "comm=fp32", "max_grad_norm=0", *LEAN),
    "zero2 pairs": ("+recipe=nvfp4", *SPLIT, *PAIRS, "comm=fp32", "parallel.reshard_after_forward=false"),
    "zero2": ("+recipe=fp8", *SPLIT, "comm=fp32", "parallel.reshard_after_forward=false"),
    "stable": ("+recipe=bf16", *SPLIT, "comm=fp32", "optim=stable_adamw"),
    "muon": ("+recipe=bf16", *SPLIT, "comm=fp32", "max_grad_norm=0", "optim=muon"),
    "muon gpt": ("+recipe=fp8", "model=gpt_tiny", "comm=fp32", "max_grad_norm=0", "optim=muon", E4M3_MOMENTUM),
    "in bf16": ("+recipe=fp8", *SPLIT, "comm=fp32", "max_grad_norm=0"),
    "weights again": ("+recipe=fp8", *SPLIT, *WEIGHTS_AGAIN, "comm=fp32", "max_grad_norm=0"),
    "some blocks again": ("+recipe=fp8", *SPLIT, *FIRST_AGAIN, "comm=fp32", "max_grad_norm=0"),
    "qwen 3": ("+recipe=fp8", *SPLIT, *WIDE_HEADS, "comm=fp32", "max_grad_norm=0"),
    "post-norm": ("+recipe=fp8", *SPLIT, "model.norm_placement=post", "seed=4", "comm=fp32", "max_grad_norm=0"),
    "own comm fp4": ("+recipe=fp4", *SPLIT),
    "own comm bf16": ("+recipe=bf16", *SPLIT),
}
CUT = (
    "gpt",
    "gpt fp8",
    "clipped",
    "clipped in backward",
    "lean coat",
    "loss in chunks",
    "muon",
    "muon gpt",
    "in bf16",
    "qwen 3",
)
CUT += ("own comm fp4", "pairs", "some blocks again", "weights again")
"""Options that tensor parallel changes: parameters, norms, saved activations or sums that are cut another way."""

SUMMED = {  # with several micro-batches, where whole gradients are added up
    "sums in fp32": ("+recipe=fp8", *SPLIT, "comm=fp32", "max_grad_norm=0", f"{SUMS}=fp32"),
    "sums in bf16": ("+recipe=fp8", *SPLIT, "comm=fp32", f"{SUMS}=bf16", "+optim.grad_accumulation.stochastic=true"),
}


def cases_of(layout: str) -> tuple[str, ...]:
    """By day every recipe but those of `BY_NIGHT`, and all options, with data parallel, where they are held to equal
    bits; where tensor parallel joins it, every recipe and the options that it changes; elsewhere `EVERYWHERE`.
    """
    if layout == "dp2":
        return tuple(name for name in CASES if name not in BY_NIGHT)
    return (*RECIPES, *CUT) if layout == "dp2-tp2" else EVERYWHERE


def night_of(layout: str) -> tuple[str, ...]:
    """All other cases: the options only where there is data parallel and no replica, as by day."""
    cases = CASES if layout in ("dp2", "dp2-tp2") else (*RECIPES, *BY_NIGHT)
    return tuple(name for name in cases if name not in cases_of(layout))


class Walks:
    """Sequence i of step s: a walk over the vocabulary that depends on (s, i) alone; a few targets are ignored."""

    def batch(self, step: int, first: int, count: int, per_step: int) -> Batch:
        rows = []
        for index in range(first, first + count):
            generator = torch.Generator().manual_seed(7_919 * (step * per_step + index) + 1)
            rows.append(torch.randint(0, 5, (SEQ + 1,), generator=generator).cumsum(0) % VOCAB)
        block = torch.stack(rows)
        targets = block[:, 1:].clone()
        targets[:, : first % 3] = -100
        return Batch(tokens=block[:, :-1].contiguous(), targets=targets, documents=None)


@dataclass(frozen=True)
class Job:
    """A run, and the dtype between its layers. Composed before processes are started, which do not compose it again."""

    run: RunConfig
    stream: torch.dtype


def described(case: str, sizes: Sizes, *, split: bool = False, accumulation: int = 1, steps: int = STEPS) -> Job:
    """A case at a layout (`split`), or in the one process that it is compared with."""
    tokens = MICRO * SEQ * sizes.dp * accumulation
    layout = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    grid = [f"parallel.{key}={value}" for key, value in layout.items()] if split else []
    run = composed(*TINY, *(CASES | SUMMED)[case], f"tokens_per_step={tokens}", f"steps={steps}", *grid)
    return Job(run, torch.float32 if sizes.tp > 1 and case != "in bf16" else torch.bfloat16)


def trained(job: Job, world: World = ALONE) -> dict[str, list[float]]:
    """What all steps of a run compute; every process of the group calls it."""
    trainer = built(job.run, world, job.stream)
    losses, norms = [], []
    for _ in range(job.run.steps):
        metrics = trainer.step()
        losses.append(float(metrics["train/loss"]))
        norms.append(float(metrics["train/grad_norm"]))
    return {"loss": losses, "norm": norms, "valid": [trainer.evaluate()["valid/loss"]]}


def noises(job: Job, world: World = ALONE) -> list[torch.Tensor]:
    """What rounding does to a weight in each micro-batch of a step, one tensor for each that this process takes."""
    trainer, found = built(job.run, world, job.stream), []
    at = trainer.seeds.at

    def watched(step: int, first_token: int) -> Draws:
        draws = at(step, first_token)
        found.append(weight_noise(mxfp4.recipe(), draws.site(1)))
        return draws

    trainer.seeds.at = watched
    trainer.step()
    return found


def built(run: RunConfig, world: World, stream: torch.dtype) -> Trainer:
    """The trainer of a run on the text of `Walks`, as `train.build` puts it together. stream: dtype between layers."""
    laid_out = build.layout(run)
    laid_out.model.dtype = stream
    distribution = build.distribution(run, laid_out, world, CPU)
    plans = laid_out.plans(CPU)
    text = Corpus(Walks(), Walks())
    return build.trainer(run, laid_out, plans, text, distribution, CPU, compiled=False)


def work(rank: int, jobs: dict[str, Job], noise: Job, processes: int) -> dict[str, dict[str, list[float]]]:
    world = World(rank, processes, rank)
    return {case: trained(job, world) for case, job in jobs.items()} | {"noise": noises(noise, world)}


def launched(layout: str, steps: int = STEPS, cases: Sequence[str] = ()) -> list[dict[str, dict[str, list[float]]]]:
    """What each rank returned. cases: those of the layout where none are named."""
    sizes = LAYOUTS[layout]
    jobs = {case: described(case, sizes, split=True, steps=steps) for case in cases or cases_of(layout)}
    jobs["fp8, accumulation 2"] = described("fp8", sizes, split=True, accumulation=2, steps=steps)
    for case in SUMMED if layout == "dp2" else ():
        jobs[case] = described(case, sizes, split=True, accumulation=2, steps=steps)
    noise = described("mxfp4", sizes, split=True, accumulation=2, steps=1)
    return run_distributed(work, sizes, jobs, noise, sizes.processes, timeout=240 * steps)
