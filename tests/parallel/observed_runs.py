"""Short runs with telemetry at one layout of processes; each rank returns losses, rows and the ops of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.launch import ALONE, World
from tests.parallel.runs import CASES, LAYOUTS, MICRO, SEQ, TINY, Job, built
from tests.recipes import composed

QUANTIZED = "parallel.param_all_gather=quantized"
EACH = "parallel.grad_reduce=every_microbatch"
RESIDUAL = "precision.override.fprop.outliers.variant=residual"
AT = {
    "dp2": {
        "fp8": (QUANTIZED, "model.recompute=full"),
        "coat": (EACH, "parallel.param_all_gather=bf16"),
        "fp4": (QUANTIZED, RESIDUAL),
        "muon gpt": (),
    },
    "dp2-tp2": {"coat": (), "fp4": (), "fp4_fold": (), "nvfp4": (QUANTIZED,)},
    "replicate2-shard2": {"fp8": (QUANTIZED,)},
}
STEPS, INTERVAL = 2, 2


class Counted(TorchDispatchMode):
    """How often each op is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def described(case: str, sizes: Sizes, interval: int, *overrides: str, split: bool = True) -> Job:
    """A case at a layout, or in one process (`split` is False), with a micro-batch of each rank per step."""
    grid = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    layout = [f"parallel.{key}={value}" for key, value in grid.items()] if split else []
    tokens = f"tokens_per_step={MICRO * SEQ * sizes.dp}"
    run = composed(*CASES[case], *TINY, *overrides, tokens, f"steps={STEPS}", *layout)
    dtype = torch.float32 if sizes.tp > 1 else torch.bfloat16
    return Job(replace(run, telemetry_interval=interval), dtype)


def trained(job: Job, world: World = ALONE) -> dict:
    """Losses of all steps, rows of those that were observed, ops of the first step."""
    trainer = built(job.run, world, job.stream)
    with Counted() as first:
        losses = [float(trainer.step()["train/loss"])]
    rows = trainer.telemetry.read(1)
    losses.append(float(trainer.step()["train/loss"]))
    return {"loss": losses, "rows": rows + trainer.telemetry.read(2), "ops": first.ops}


def work(rank: int, jobs: dict[tuple[str, int], Job], processes: int) -> dict[tuple[str, int], dict]:
    return {name: trained(job, World(rank, processes, rank)) for name, job in jobs.items()}


def jobs(layout: str) -> dict[tuple[str, int], Job]:
    """(case, interval) -> run, each observed at the second step, and never. Tensor parallelism adds in another order,
    which tips roundings from the first update on: there the first step is observed.
    """
    sizes = LAYOUTS[layout]
    observed = 1 if sizes.tp > 1 else INTERVAL
    pairs = [(case, interval) for case in AT[layout] for interval in (0, observed)]
    return {(case, interval): described(case, sizes, interval, *AT[layout][case]) for case, interval in pairs}
