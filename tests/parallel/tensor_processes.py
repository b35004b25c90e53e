"""Models cut over two ranks, eager and compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor

from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.group import Group
from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer, compile_method
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.parallel import tensor
from lowprec_train.precision.policy import apply_policy
from lowprec_train.precision.saved_activations import SavedActivationPolicy, apply_saved_activations
from lowprec_train.recipes import bf16
from tests.recipes import GPT, LLAMA, RECIPES

RANKS, BATCH, SEQ = 2, 4, 32
SIZES = {"vocab_size": 64, "dim": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256, "max_seq_len": SEQ}
CODES = Quantizer(E4M3, tile=(1, 16), scale=ScaleRule.POW2)
CODED = SavedActivationPolicy(norm=CODES, activation=CODES)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its blocks' recipe, what norms and activations keep, whether sequences hold several documents."""

    family: dict[str, Any]
    recipe: str
    recompute: str = "none"
    keep: SavedActivationPolicy | None = None
    documents: bool = False


CASES = {
    "llama": Case(family=dict(LLAMA), recipe="fp8"),
    "llama selective": Case(family=dict(LLAMA), recipe="mxfp4", recompute="selective", documents=True),
    "llama coded": Case(family=dict(LLAMA), recipe="fp8", keep=CODED),
    "gpt full": Case(family=dict(GPT), recipe="bf16", recompute="full"),
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """loss; gradients and the dimension in which each is cut, by name; graphs of a block, None for an eager pass."""

    loss: Tensor
    gradients: dict[str, Tensor]
    cuts: dict[str, int]
    summed: list[str]
    graphs: int | None = None


def build(case: Case, group: Group | None, device: torch.device) -> tuple[Transformer, dict[str, int]]:
    """The whole model, or the part of one rank, with the same first values; FP32, so that only codes are rounded."""
    with torch.device("meta"):
        model = Transformer(Architecture(**SIZES, **case.family, recompute=case.recompute), dtype=torch.float32)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    cuts = {} if group is None else tensor.apply(model, group)
    model.to_empty(device=device)

    def fill(name, parameter, first_value):
        value = first_value(shapes[name])
        parameter.copy_(value.chunk(group.size, cuts[name])[group.rank] if name in cuts else value)

    model.init_weights(0, fill)
    apply_policy(model, {"blocks.*": RECIPES[case.recipe], "*": bf16.recipe()})
    apply_saved_activations(model, case.keep or SavedActivationPolicy())
    return model, cuts


def passes(case: Case, group: Group | None, device: torch.device, backend: str | None = None) -> Ran:
    """One forward and backward pass over the same tokens on every rank."""
    torch._dynamo.reset()
    model, cuts = build(case, group, device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend or "eager")
    if backend is not None:
        for block in model.blocks:
            compile_method(block, "forward", fullgraph=True, backend=counter)
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, SIZES["vocab_size"], (2, BATCH, SEQ), generator=generator)
    targets[0, :5] = -100
    documents = (torch.arange(SEQ) // 9).expand(BATCH, SEQ).to(device) if case.documents else None
    draws = SeedTable(0, model.number_sites(), device).at(3, 8)
    loss = model.loss(tokens.to(device), targets.to(device), 100.0, documents, draws)
    loss.backward()
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return Ran(
        loss=loss.detach().cpu(),
        gradients=gradients,
        cuts=cuts,
        summed=tensor.summed_over_tp(model) if group else [],
        graphs=counter.frame_count if backend else None,
    )


def work(rank: int, kind: str) -> dict[str, list[Ran]]:
    """(eager, compiled) of every case on one of two ranks of a kind of device."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    group = DistributedGroup.of(dist.new_group(list(range(RANKS))))
    compiler = "inductor" if kind == "cuda" else "aot_eager"
    return {name: [passes(case, group, device, each) for each in (None, compiler)] for name, case in CASES.items()}
