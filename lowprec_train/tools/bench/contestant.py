"""A contestant of `lowprec bench step`: a name, a way to build a model, and a way to update its weights.

All contestants do the same `Work`: the same sizes, batch, token ids, attention call and optimizer. A contestant builds
its model on the device of the work; on the meta device, this finds errors without cost.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lowprec_train.tools.bench.configuration import model_overrides
from lowprec_train.train import build
from lowprec_train.train.compose import composed

LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-4, 0.1, (0.9, 0.95)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Step = Callable[[], Tensor]
Update = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of every contestant.

    model: name of a configuration, or sizes (`configuration.model_overrides`). parameters: dtype of matrices, "bf16" or
    "fp32". clip: maximum gradient norm, 0 for no clipping. overrides: for the trainer's models. micro_batches: number
    per step, of `batch` sequences each.
    """

    model: str
    batch: int
    seq_len: int
    device: torch.device
    compiled: bool = True
    parameters: str = "bf16"
    clip: float = 0.0
    seed: int = 0
    micro_batches: int = 1
    overrides: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of one step."""
        return self.batch * self.seq_len * self.micro_batches

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters that are matrices."""
        return DTYPES[self.parameters]

    @property
    def baseline(self) -> Work:
        """This work without changes of `precision` and of recomputation, which are for recipes and not for the BF16
        beside them.
        """
        ours = re.compile(r"[+~]*(precision[./=@]|precision$|model\.((full_)?recompute_layers|recompute)=)")
        return replace(self, overrides=tuple(each for each in self.overrides if not ours.match(each)))

    @property
    def hydra(self) -> list[str]:
        """Overrides of `train.yaml`."""
        shape = [f"micro_batch={self.batch}", f"data.seq_len={self.seq_len}", f"tokens_per_step={self.tokens}"]
        return [
            *model_overrides(self.model),
            *shape,
            f"max_grad_norm={self.clip}",
            f"seed={self.seed}",
            *self.overrides,
        ]

    def check(self) -> None:
        """Raise ValueError if the model cannot be built, or with a setting that only the trainer has."""
        run = composed(*self.baseline.hydra)
        build.layout(run)
        if run.cuda_graph:
            raise ValueError("cuda_graph=true is a setting of the trainer; measure it with an arm of bench parallel")

    @cached_property
    def sizes(self) -> dict[str, int]:
        """vocab_size, dim, layers, heads and ffn of the model."""
        model = composed(*self.baseline.hydra).model
        parts = (model.attention, model.norm, model.activation, model.positions, model.bias, model.tied)
        if parts != ("causal", "rmsnorm", "swiglu", "rotary", False, False):
            raise ValueError(f"the peers are LLaMA models, and {self.model} is not")
        return {name: getattr(model, name) for name in ("vocab_size", "dim", "layers", "heads", "ffn")}

    @cached_property
    def batch_of_tokens(self) -> Tensor:
        """Token ids [batch, seq_len], int64, the same for every contestant."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.seq_len)
        return torch.randint(self.sizes["vocab_size"], shape, generator=generator).to(self.device)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on its device. loss(tokens, targets) -> 0-dim, called once per step."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]


def fused_adamw(work: Work, module: nn.Module) -> Update:
    """Return the update by torch's fused AdamW in the parameters' dtype, as for the peers."""
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def update() -> None:
        if work.clip:
            nn.utils.clip_grad_norm_(parameters, work.clip)
        optimizer.step()
        optimizer.zero_grad()

    return update


@dataclass(frozen=True, kw_only=True)
class Entrant(ABC):
    """A contestant. baseline: computes in BF16 only. needs: a package that may be missing. apart: runs in a separate
    process, and must be picklable. recorded: it allocates in its first steps only, and repeats them as a CUDA graph.
    """

    name: str
    baseline: bool = False
    needs: str | None = None
    apart: bool = False
    recorded: bool = False

    @property
    def missing(self) -> str | None:
        """Why the contestant cannot run; None if it can."""
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"

    @abstractmethod
    def stepper(self, work: Work) -> Step:
        """Return its training step: forward, backward and update."""


@dataclass(frozen=True, kw_only=True)
class Contestant(Entrant):
    """A contestant that trains a model on one device."""

    build: Callable[[Work], Built]
    update: Callable[[Work, nn.Module], Update] = fused_adamw

    def stepper(self, work: Work) -> Step:
        return self.train(work)[1]

    def train(self, work: Work, forward_done: Callable[[], None] = lambda: None) -> tuple[nn.Module, Step]:
        """Return the model and its step; the step calls `forward_done` after the forward pass."""
        built = self.build(work)
        update = self.update(work, built.module)
        tokens = work.batch_of_tokens
        targets = tokens.roll(-1, 1)

        def step() -> Tensor:
            loss = built.loss(tokens, targets)
            forward_done()
            loss.backward()
            update()
            return loss.detach()

        return built.module, step


def cast_matrices(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters with two or more dimensions; buffers and norms keep their dtypes."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def first_values(matrices: Iterable[Tensor], seed: int, std: float = 0.02) -> None:
    """Draw normal weights on their device: the trainer's initialisation takes half a minute on the host at 7B."""
    for index, matrix in enumerate(matrices):
        if not matrix.is_meta:
            matrix.normal_(0.0, std, generator=torch.Generator(matrix.device).manual_seed(seed + index))
