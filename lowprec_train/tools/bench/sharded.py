"""Contestants of `lowprec bench parallel`: runs of the trainer, and FSDP2 of plain PyTorch and of torchao.

    fp8                                            as `train.py +recipe=fp8` trains, with the recipe's comm and optim
    fp8 comm=bf16 parallel.param_all_gather=bf16   with overrides
    fp8 alone                                      a separate model on every GPU, without communication

All have FP32 parameters, compute in BF16 what a recipe does not quantise, and have the same number of sequences per
GPU: with parallel.tp=2 a micro-batch has twice as many. Our steps are those of the trainer, with data, gradient norm
and optimizer. Peers have their fastest settings: blocks compiled one by one and prefetched explicitly, torch's fused
AdamW, no gradient norm; torchao with FP8 all-gather and one computation of all scales per step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lowprec_train.comm.fsdp_units import fsdp_units
from lowprec_train.config import RunConfig, choices
from lowprec_train.data.corpus import Corpus
from lowprec_train.data.loader import Batch, Dataset
from lowprec_train.model.transformer import Fill
from lowprec_train.tools.bench.contestant import Entrant, Step, Work, fused_adamw
from lowprec_train.tools.bench.peers import Plain
from lowprec_train.train import build
from lowprec_train.train.compose import composed
from lowprec_train.train.distribute import Distribution
from lowprec_train.train.launch import ALONE, World
from lowprec_train.train.trainer import Trainer

BASELINE = "bf16"
NO_END = 1 << 20  # steps in the configuration; the run is not trained to its end
STD = 0.02  # of initial weights


@dataclass(frozen=True, kw_only=True)
class Sharded(Entrant):
    """make: returns this rank's training step. facts: entries of its row that are known before it is built."""

    make: Callable[[Work], Step]
    facts: Callable[[Work], dict[str, Any]] = lambda work: {}

    def stepper(self, work: Work) -> Step:
        return self.make(work)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A run of the trainer. overrides: of `train.py`. alone: each rank trains a separate model."""

    recipe: str
    overrides: tuple[str, ...] = ()
    alone: bool = False

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Parse an arm. Raises ValueError for an unknown recipe, and for words that are not overrides."""
        recipe, *words = text.split() or [""]
        if recipe not in choices("recipe"):
            raise ValueError(f"no recipe {recipe!r}; there are {', '.join(choices('recipe'))}")
        alone, overrides = "alone" in words, tuple(word for word in words if word != "alone")
        if strange := [word for word in overrides if "=" not in word]:
            raise ValueError(f"{text!r}: {strange[0]!r} is neither an override, as in tp=2, nor alone")
        return cls(recipe=recipe, overrides=overrides, alone=alone)

    def __str__(self) -> str:
        return " ".join([self.recipe, *self.overrides, *(["alone"] if self.alone else [])])

    def contestant(self, world: World) -> Sharded:
        """Return its contestant, whose name is the text of the arm."""
        there = ALONE if self.alone else world
        facts, make = partial(self.facts, processes=there.processes), partial(self.step, world=there)
        baseline = self.recipe == BASELINE and not self.alone
        return Sharded(name=str(self), make=make, baseline=baseline, facts=facts, recorded=self.recorded)

    @property
    def recorded(self) -> bool:
        """Whether the run repeats a CUDA graph."""
        return composed(f"+recipe={self.recipe}", *self.overrides).cuda_graph

    def run(self, work: Work, processes: int) -> RunConfig:
        """Return the configuration of its run on `processes`. Raises ValueError if it does not compose."""
        run = composed(*work.hydra, f"+recipe={self.recipe}", *self.overrides)
        batch = work.batch * run.parallel.tp
        return replace(run, micro_batch=batch, tokens_per_step=work.tokens * processes, steps=NO_END)

    def facts(self, work: Work, processes: int) -> dict[str, Any]:
        """Return the estimated GiB at the peak, and the GB that a GPU sends per step."""
        from lowprec_train.tools.estimate.report import GB, GIB

        found = self.estimate(work, processes)
        return {"estimated_gib": found["memory"]["total"] / GIB, "sent_gb": found["traffic"]["total"] / GB}

    def estimate(self, work: Work, processes: int) -> dict[str, Any]:
        """Return the result of `lowprec estimate` for the first phase of the run, the only one that is measured."""
        from lowprec_train.tools.estimate.report import estimate

        run = self.run(work, processes)
        return estimate(replace(run, precision=replace(run.precision, schedule={})), processes)

    def step(self, work: Work, world: World) -> Step:
        """Return the trainer's step on this rank."""
        return self.stepping(self.trainer(work, world))

    def trainer(self, work: Work, world: World) -> Trainer:
        """Return this rank's trainer, before its first step."""
        run, device = self.run(work, world.processes), work.device
        laid_out = build.layout(run)
        distribution = build.distribution(run, laid_out, world, device)
        plans = laid_out.plans(device, shards=distribution.sizes.dp_shard)
        text = random_corpus(work, run.tokens_per_step // work.seq_len)
        fill = drawn(distribution, work.seed)
        return build.trainer(run, laid_out, plans, text, distribution, device, compiled=work.compiled, fill=fill)

    @staticmethod
    def stepping(made: Trainer) -> Step:
        """Return the trainer's step, which returns the loss."""

        def step() -> Tensor:
            loss = made.step()["train/loss"]
            assert isinstance(loss, Tensor)
            return loss

        return step


class RandomTokens(Dataset):
    """The same sequences in every step. tokens: int64 [sequences of a step, seq_len]."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def batch(self, step: int, first: int, count: int, per_step: int) -> Batch:
        tokens = self._tokens[first : first + count]
        return Batch(tokens=tokens, targets=tokens.roll(-1, 1), documents=None)


def random_corpus(work: Work, sequences: int) -> Corpus:
    """Return a corpus of uniform random tokens. sequences: per step."""
    generator, words = torch.Generator().manual_seed(work.seed), work.sizes["vocab_size"]
    tokens = RandomTokens(torch.randint(words, (sequences, work.seq_len), generator=generator))
    return Corpus(train=tokens, valid=tokens, hash="", vocab_size=words, name="random tokens")


def drawn(distribution: Distribution, seed: int) -> Fill:
    """Return a function that draws each rank's shards of matrices on the device. The trainer's initialisation, which is
    the same for every layout, takes half a minute on the host at 7B.
    """

    @torch.no_grad()
    def fill(name: str, parameter: Tensor, first_value: Callable[[torch.Size], Tensor]) -> None:
        if parameter.ndim < 2:
            distribution.fill(name, parameter, first_value)
        else:
            draw(name, parameter, seed)

    return fill


@torch.no_grad()
def draw(name: str, parameter: Tensor, seed: int) -> None:
    """Draw normal values for this rank's shard of a matrix."""
    mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    seed = zlib.crc32(f"{seed} {rank} {name}".encode())
    mine.normal_(0.0, STD, generator=torch.Generator(mine.device).manual_seed(seed))


def fsdp2(work: Work, *, float8: str | None = None, together: int = 1) -> Step:
    """Return a step of plain PyTorch with `fully_shard` (ZeRO-3) and FP32 gradient reduction. float8: a recipe of
    torchao. together: blocks of a unit.
    """
    with torch.device("meta"):
        model = Plain(**work.sizes, seq_len=work.seq_len)
    if float8:
        _to_float8(model, float8)
    mesh = init_device_mesh(work.device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = cast(nn.Module, torch.compile(block)) if work.compiled else block
    for first in range(0, len(model.blocks), together):
        fully_shard([*model.blocks[first : first + together]], mesh=mesh, mp_policy=policy)
    if work.compiled:
        model.tail.compile()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit, following in pairwise(fsdp_units(model)):
        unit.set_modules_to_forward_prefetch([following])
    model.to_empty(device=work.device)
    _first_values(model, work.seed)
    update = fused_adamw(work, model)
    generator = torch.Generator().manual_seed(work.seed + 1 + torch.distributed.get_rank())
    shape = (work.micro_batches, work.batch, work.seq_len)
    tokens = torch.randint(work.sizes["vocab_size"], shape, generator=generator).to(work.device)

    def step() -> Tensor:
        total = torch.zeros((), device=work.device)
        for index, each in enumerate(tokens):
            model.set_requires_gradient_sync(index == len(tokens) - 1)  # type: ignore[operator]
            loss = model(each, each.roll(-1, 1)) / len(tokens)
            loss.backward()
            total += loss.detach()
        update()
        if float8 == TENSORWISE:
            _precompute_scales(model)
        return total

    return step


TENSORWISE = "tensorwise"


def _to_float8(model: Plain, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == TENSORWISE:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "head" not in name)


def _precompute_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def _first_values(model: Plain, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            draw(name, parameter, seed)
        else:
            parameter.fill_(1.0)
    model.reset_angles()


def peers(texts: Iterable[str]) -> list[Sharded]:
    """Return peers by name. Raises ValueError for an unknown name."""
    found = []
    for text in texts:
        if text not in PEERS:
            raise ValueError(f"no peer {text!r}; there are {', '.join(PEERS)}")
        found.append(PEERS[text])
    return found


PEERS = {
    "plain": Sharded(name="plain FSDP2 bf16", make=fsdp2, baseline=True),
    "plain-pairs": Sharded(name="plain FSDP2 bf16, units of two blocks", make=partial(fsdp2, together=2)),
    "torchao": Sharded(
        name="torchao tensorwise, FP8 all-gather", make=partial(fsdp2, float8=TENSORWISE), needs="torchao"
    ),
    "torchao-rowwise": Sharded(name="torchao rowwise", make=partial(fsdp2, float8="rowwise"), needs="torchao"),
}
