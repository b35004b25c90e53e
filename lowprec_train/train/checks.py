"""Checks before any work: one error per fault, with the offending values.

Parts check their own arguments; this module has the checks that need two parts, or the machine. Code after them is not
defensive. All raise ValueError.
"""

import importlib.util
import re
import shutil
from collections.abc import Mapping

import torch
from torch import nn

from lowprec_train.config import Compile, ParallelConfig, RunConfig, parse_resume
from lowprec_train.parallel.all_gather_format import PARAM_ALL_GATHER
from lowprec_train.parallel.data import GRAD_REDUCE
from lowprec_train.parallel.mesh import Sizes, check_nodes, sizes
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
    """Numbers that must fit each other, and what this machine must have. Returns the device and whether to compile."""
    parse_resume(run.resume)
    ranges.check(run)
    _words(run)
    _batch(run, layout(run, world.processes))
    if run.telemetry_interval and world.processes > 1:
        raise ValueError(
            f"telemetry_interval={run.telemetry_interval} watches the roundings of one process, and "
            f"{world.processes} were started; telemetry_interval=0 turns it off"
        )
    _profile(run, on := device(run.device, world), world)
    for package in OPTIONAL_PACKAGES:
        if package in run.logger:
            needs_package(package, extra=package, what=f"logger={package}")
    return on, compiles(run.compile, on)


def _profile(run: RunConfig, on: torch.device, world: World) -> None:
    asked = run.profile
    if asked.steps and asked.first > run.steps:
        raise ValueError(f"profile.first={asked.first} is after the last step, {run.steps}")
    if asked.steps and not asked.ranks:
        raise ValueError(f"profile.steps={asked.steps} with profile.ranks=[] profiles nothing")
    unknown = [rank for rank in asked.ranks if not 0 <= rank < world.processes]
    if unknown:
        raise ValueError(
            f"profile.ranks={asked.ranks}: there is no rank {unknown[0]} among {world.processes} processes"
        )
    if asked.allocations and on.type != "cuda":
        raise ValueError(
            f"profile.allocations={asked.allocations} records GPU memory, and this run is on {on.type}; "
            "profile.memory=true with profile.steps shows tensors on any device"
        )


def layout(run: RunConfig, processes: int) -> Sizes:
    """The grid of processes that `parallel` asks for."""
    asked = run.parallel
    made = sizes(processes, dp_replicate=asked.dp_replicate, dp_shard=asked.dp_shard, tp=asked.tp)
    check_nodes(made, run.comm.get("node_size"))
    return made


def choices(asked: ParallelConfig) -> None:
    """Values of `parallel` that are names."""
    for key, value, known in (
        ("grad_reduce", asked.grad_reduce, GRAD_REDUCE),
        ("param_all_gather", asked.param_all_gather, PARAM_ALL_GATHER),
    ):
        if value not in known:
            raise ValueError(f"parallel.{key}={value!r} is not one of {', '.join(known)}")


def _words(run: RunConfig) -> None:
    choices(run.parallel)
    if not NAME.fullmatch(run.model.name):
        raise ValueError(f"model.name={run.model.name!r} cannot be part of a run's name: letters, digits, _ . = + -")
    if not 0 <= run.seed < 1 << 63:
        raise ValueError(f"seed={run.seed} must be at least 0 and below 2**63")
    if run.weights is not None and not run.weights.strip():
        raise ValueError(f"weights={run.weights!r} names nothing; weights=null draws them")
    if not run.run_root.strip():
        raise ValueError(f"run_root={run.run_root!r} names no directory; run_root=. is this one")


def sequence(run: RunConfig) -> None:
    """The length of sequences."""
    seq_len = run.data.get("seq_len")
    if not isinstance(seq_len, int) or seq_len < 1:
        raise ValueError(f"data.seq_len={seq_len!r} must be a positive number of tokens")
    if seq_len % SEQUENCE_MULTIPLE:
        raise ValueError(
            f"data.seq_len={seq_len} must be a multiple of {SEQUENCE_MULTIPLE}: draws are made for 8 tokens at a time"
        )
    if seq_len > run.model.max_seq_len:
        raise ValueError(f"data.seq_len={seq_len} is longer than model.max_seq_len={run.model.max_seq_len}")


def _batch(run: RunConfig, grid: Sizes) -> None:
    sequence(run)
    seq_len = run.data["seq_len"]
    tokens = run.micro_batch * seq_len * grid.dp
    if run.tokens_per_step % tokens:
        raise ValueError(
            f"tokens_per_step={run.tokens_per_step} is not a multiple of micro_batch * data.seq_len * data-parallel "
            f"processes = {run.micro_batch} * {seq_len} * {grid.dp} = {tokens}"
        )


def device(name: str, world: World = ALONE) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device that is there; of many processes each gets a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if world.processes > 1 and name.startswith("cuda:"):
        raise ValueError(f"device={name}: {world.processes} processes cannot share one GPU; device=cuda gives each one")
    if name == "cuda" and world.processes > 1:
        name = f"cuda:{world.local_rank}"
    kind, _, index = name.partition(":")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name} was asked for, but torch {torch.__version__} finds no CUDA device")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name} is not there: {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")


def compiles(choice: Compile, on: torch.device) -> bool:
    """Whether to compile; a compiler that is missing on this machine is an error only when the choice was made."""
    if choice is Compile.off or (choice is Compile.auto and on.type == "cpu"):
        return False
    if on.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"compile={choice.name} on {on} needs triton, which is not installed; compile=off runs without"
        )
    names = ("c++", "g++", "clang++") if on.type == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, names)):
        raise ValueError(f"compile={choice.name} on {on} needs a compiler, and none of {', '.join(names)} is on PATH")
    return True


def nodes(run: RunConfig) -> None:
    """The open nodes of a configuration against what they name, before anything is built: ValueError as `construct`."""
    checked(run.data, "data")
    checked(run.comm, "comm")
    optional = [part for part in ("rule", "grad_accumulation") if getattr(run.optim, part)]
    for part in ("schedule", "master", "first_moment", "second_moment", *optional):
        checked(getattr(run.optim, part), f"optim.{part}")
    for name, node in run.logger.items():
        checked(node, f"logger.{name}", ("run",))


def linears(model: nn.Module, effective: Mapping[str, LinearRecipe], tokens: int) -> None:
    """Every tile and rotation divides its dimension. `tokens`: of one micro-batch."""
    for name, recipe in effective.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        recipes.check(
            recipe, name=name, in_features=linear.in_features, out_features=linear.out_features, tokens=tokens
        )


def corpus(name: str, saved: str | None, now: str) -> None:
    """A run goes on with the text it began with."""
    if saved not in (None, now):
        raise ValueError(
            f"run {name!r} began on a corpus with hash {saved}, the data now has {now}; restore the data, or choose "
            "another name=..., or resume=never to move the earlier run aside"
        )
