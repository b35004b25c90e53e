"""Checks before any work starts: one ValueError per fault, with the offending values.

Each part checks its own arguments. This module checks settings that involve two parts or the machine. Code that runs
after these checks is not defensive.
"""

import importlib.util
import re
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.comm.symmetric_memory import MOST_RANKS
from lowprec_train.config import Compile, ParallelConfig, RunConfig, parse_resume
from lowprec_train.parallel.all_gather_format import PARAM_ALL_GATHER
from lowprec_train.parallel.data import GRAD_REDUCE
from lowprec_train.parallel.mesh import Sizes, check_nodes, groups_along, node_ranks, sizes
from lowprec_train.precision import recipe as recipes
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.train import ranges
from lowprec_train.train.construct import checked
from lowprec_train.train.launch import ALONE, World
from lowprec_train.train.packages import needs_package
from lowprec_train.train.rundir import NAME

OPTIONAL_PACKAGES = ("tensorboard", "wandb")
SEQUENCE_MULTIPLE = 8


def configuration(run: RunConfig, world: World = ALONE) -> tuple[torch.device, bool]:
    """Check settings that depend on each other or on this machine. Returns the device and whether to compile."""
    parse_resume(run.resume)
    _seed(run)
    ranges.check(run)
    _words(run)
    batch(run, layout(run, world.processes))
    _profile(run, on := device(run.device, world), world)
    for package in OPTIONAL_PACKAGES:
        if package in run.logger:
            needs_package(package, extra=package, what=f"logger={package}")
    return on, compiles(run.compile, on)


def _profile(run: RunConfig, on: torch.device, world: World) -> None:
    profile = run.profile
    if profile.steps and profile.first > run.steps:
        raise ValueError(f"profile.first={profile.first} is after the last step, {run.steps}")
    if profile.steps and not profile.ranks:
        raise ValueError(f"profile.steps={profile.steps} with profile.ranks=[] profiles nothing")
    unknown = [rank for rank in profile.ranks if not 0 <= rank < world.processes]
    if unknown:
        raise ValueError(
            f"profile.ranks={profile.ranks}: there is no rank {unknown[0]} among {world.processes} processes"
        )
    if profile.allocations and on.type != "cuda":
        raise ValueError(
            f"profile.allocations={profile.allocations} records GPU memory, and this run is on {on.type}; "
            "use profile.memory=true with profile.steps, which records tensors on any device"
        )


def layout(run: RunConfig, processes: int) -> Sizes:
    """Return the process grid of the `parallel` settings."""
    parallel = run.parallel
    grid = sizes(processes, dp_replicate=parallel.dp_replicate, dp_shard=parallel.dp_shard, tp=parallel.tp)
    check_nodes(grid, run.comm.get("node_size"))
    return grid


def symmetric_memory(run: RunConfig, grid: Sizes, codec: GradCodec, on: torch.device | str, node_size: int) -> None:
    """Check `parallel.symmetric_memory`. on: the kind of device. node_size: processes per node."""
    if not run.parallel.symmetric_memory or grid.dp_shard == 1:
        return
    node = node_ranks(groups_along(grid, "dp_shard"), node_size) or 1
    needs = ""
    if torch.device(on).type != "cuda":
        needs = f"CUDA GPUs, and this run is on {torch.device(on).type}"
    elif not isinstance(codec, BlockScaledCodec) or not codec.format.scaled:
        needs = f"gradients in blocks of FP8 (comm=fp8 or comm=fp8_e5m2), and they are sent in {codec}"
    elif node != grid.dp_shard or node > MOST_RANKS:
        needs = f"all {grid.dp_shard} ranks of dp_shard, at most {MOST_RANKS}, on one node of {node_size} processes"
    if needs:
        raise ValueError(f"parallel.symmetric_memory=true needs {needs}; use parallel.symmetric_memory=false")


def choices(parallel: ParallelConfig) -> None:
    """Check the values of `parallel` that are names."""
    for key, value, known in (
        ("grad_reduce", parallel.grad_reduce, GRAD_REDUCE),
        ("param_all_gather", parallel.param_all_gather, PARAM_ALL_GATHER),
    ):
        if value not in known:
            raise ValueError(f"parallel.{key}={value!r} is not one of {', '.join(known)}")


def _seed(run: RunConfig) -> None:
    """Check the seed, before data.seed, which has its value by default."""
    if not 0 <= run.seed < 1 << 63:
        raise ValueError(f"seed={run.seed} must be at least 0 and below 2**63")


def _words(run: RunConfig) -> None:
    choices(run.parallel)
    if not NAME.fullmatch(run.model.name):
        raise ValueError(
            f"model.name={run.model.name!r} cannot be part of a run's name; use letters, digits, _ . = + -"
        )
    if run.weights is not None and not run.weights.strip():
        raise ValueError(f"weights={run.weights!r} is empty; weights=null draws the weights from the seed")
    if not run.run_root.strip():
        raise ValueError(f"run_root={run.run_root!r} is empty; run_root=. is the working directory")


def sequence(run: RunConfig) -> None:
    """Check data.seq_len."""
    seq_len = run.data.get("seq_len")
    if not isinstance(seq_len, int) or seq_len < 1:
        raise ValueError(f"data.seq_len={seq_len!r} must be a positive number of tokens")
    if seq_len % SEQUENCE_MULTIPLE:
        raise ValueError(
            f"data.seq_len={seq_len} must be a multiple of {SEQUENCE_MULTIPLE}: random draws are made for 8 tokens "
            "at a time"
        )
    if seq_len > run.model.max_seq_len:
        raise ValueError(f"data.seq_len={seq_len} is longer than model.max_seq_len={run.model.max_seq_len}")


def batch(run: RunConfig, grid: Sizes) -> None:
    """Check data.seq_len, and that a step is a whole number of micro-batches on every process."""
    sequence(run)
    if uneven := uneven_step(run, grid):
        raise ValueError(uneven)


def uneven_step(run: RunConfig, grid: Sizes) -> str:
    """Return why a step is not a whole number of micro-batches on every process; "" if it is."""
    seq_len = run.data["seq_len"]
    tokens = run.micro_batch * seq_len * grid.dp
    if not run.tokens_per_step % tokens:
        return ""
    return (
        f"tokens_per_step={run.tokens_per_step} is not a multiple of micro_batch * data.seq_len * data-parallel "
        f"processes = {run.micro_batch} * {seq_len} * {grid.dp} = {tokens}"
    )


def device(name: str, world: World = ALONE) -> torch.device:
    """Return the device that `name` selects: auto, cpu, cuda or cuda:N. With several processes each gets one GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if world.processes > 1 and name.startswith("cuda:"):
        raise ValueError(f"device={name}: {world.processes} processes cannot share one GPU; use device=cuda")
    if name == "cuda" and world.processes > 1:
        name = f"cuda:{world.local_rank}"
    kind, _, index = name.partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name} needs a GPU, but torch {torch.__version__} finds no CUDA device")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name} does not exist: torch finds {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")


def compiles(choice: Compile, on: torch.device) -> bool:
    """Return whether to compile. Raises ValueError if compilation is on and a compiler is missing."""
    if choice is Compile.off or (choice is Compile.auto and on.type == "cpu"):
        return False
    if on.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"compile={choice.name} on {on} needs triton, which is not installed; compile=off runs without it"
        )
    names = ("c++", "g++", "clang++") if on.type == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, names)):
        raise ValueError(f"compile={choice.name} on {on} needs a compiler, and none of {', '.join(names)} is on PATH")
    return True


def nodes(run: RunConfig) -> None:
    """Check the arguments of every `_target_` node against its signature, before anything is built."""
    checked(run.data, "data")
    checked(run.comm, "comm")
    optional = [part for part in ("rule", "grad_accumulation") if getattr(run.optim, part)]
    for part in ("schedule", "master", "first_moment", "second_moment", *optional):
        checked(getattr(run.optim, part), f"optim.{part}")
    for name, node in run.logger.items():
        checked(node, f"logger.{name}", ("run",))
    if "wandb" in run.logger:
        _wandb(run.logger["wandb"])


def _wandb(node: Mapping[str, Any]) -> None:
    """Check what W&B refuses only when a run begins."""
    for tag in node.get("tags") or ():
        if not 1 <= len(tag) <= 64:
            raise ValueError(f"logger.wandb.tags: {tag!r} must have 1 to 64 characters")
    project = node.get("project") or ""
    if wrong := sorted(set(project) & set("/\\#?%:")):
        raise ValueError(f"logger.wandb.project={project}: a name cannot have {' '.join(wrong)}")


def linears(model: nn.Module, effective: Mapping[str, LinearRecipe], tokens: int) -> None:
    """Check that every tile and rotation divides its dimension. tokens: of one micro-batch."""
    for name, recipe in effective.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        recipes.check(
            recipe, name=name, in_features=linear.in_features, out_features=linear.out_features, tokens=tokens
        )


def corpus(name: str, saved: str | None, now: str) -> None:
    """Check that a resumed run has the corpus that it started with."""
    if saved not in (None, now):
        raise ValueError(
            f"run {name!r} was started on a corpus with hash {saved}, but the data now has hash {now}; restore the "
            "data, or choose another name=..., or use resume=never to move the earlier run aside"
        )
