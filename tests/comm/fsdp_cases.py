"""A model of awkward shapes under `fully_shard`, and the gradients that each rank puts into it."""

from dataclasses import dataclass, field

import torch
from torch import nn

from lowprec_train.comm.fsdp import Reduction, encoded, shared_scale

RANKS = 4
LAYOUTS = {"shard": (1, 4), "hybrid": (2, 2), "replicate": (4, 1)}  # replicas, shards; shards are neighbours

# In FSDP2's order: of a unit the children first, then what it holds itself; blocks are units of their own.
UNITS = [
    {
        f"blocks.{i}.first.wide": (37, 96),  # dimension 0 is uneven
        f"blocks.{i}.first.plain": (24, 64),
        f"blocks.{i}.second.tiny": (3, 300),  # fewer rows than shards
        f"blocks.{i}.second.cube": (5, 6, 70),
        f"blocks.{i}.own": (64, 48),
    }
    for i in range(2)
]
UNITS.append({"embedding.weight": (130, 32), "last.weight": (33, 64), "top": (40, 50)})
SHAPES = {name: shape for unit in UNITS for name, shape in unit.items()}
MAGNITUDE = {name: 10.0 ** (-9 + 3 * (index % 4)) for index, name in enumerate(SHAPES)}  # of neighbours 1 to 1e-9
VECTOR, FROZEN = "blocks.0.first.norm", "blocks.1.second.frozen"
PLAIN = tuple(name for name in SHAPES if name.endswith(".plain"))


def parameter(*shape, trains=True):
    return nn.Parameter(torch.zeros(shape), requires_grad=trains)


class Weighted(nn.Module):
    """The sum over its parameters p and those of its children of (p * c).sum(): the gradient of p is c. Without a c, p
    has no gradient.
    """

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value)

    def forward(self, constants, prefix=""):
        own = ((p, constants.get(prefix + name)) for name, p in self.named_parameters(recurse=False))
        own = [(p * c).sum() for p, c in own if c is not None]
        return sum(own + [child(constants, f"{prefix}{name}.") for name, child in self.children_by_name()])

    def children_by_name(self):
        for name, child in self.named_children():
            if isinstance(child, nn.ModuleList):
                yield from ((f"{name}.{i}", each) for i, each in enumerate(child))
            else:
                yield name, child


def block():
    return Weighted(
        own=parameter(64, 48),  # registered before the children, reduced after them
        first=Weighted(norm=parameter(16), wide=parameter(37, 96), plain=parameter(24, 64)),
        second=Weighted(tiny=parameter(3, 300), frozen=parameter(8, 8, trains=False), cube=parameter(5, 6, 70)),
    )


def build(dtype=torch.float32):
    """Two blocks, a tied embedding and head, and a parameter of the root."""
    embedding = Weighted(weight=parameter(130, 32))
    model = Weighted(top=parameter(40, 50), embedding=embedding, blocks=nn.ModuleList([block(), block()]))
    model.last = Weighted(weight=parameter(33, 64))
    model.head = Weighted(weight=embedding.weight)
    return model.to(dtype)


def normal(rank, micro, name, shape):
    """Independent of rank and micro-batch, of ranks' own magnitudes."""
    index = list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(1000 * micro + 100 * rank + index)
    return torch.randn(shape, generator=generator) * MAGNITUDE[name] * 2.0**-rank


def identical(rank, micro, name, shape):
    return normal(0, micro, name, shape)


def zeros(rank, micro, name, shape):
    return torch.zeros(shape)


def silent(rank, micro, name, shape):
    """One rank has nothing to say."""
    return zeros(rank, micro, name, shape) if rank == 1 else normal(rank, micro, name, shape)


def not_a_number(rank, micro, name, shape):
    gradient = normal(rank, micro, name, shape)
    if rank == 2 and name == "blocks.1.first.wide":
        gradient[36, 95] = torch.nan
    return gradient


def numbered(rank, micro, name, shape):
    """One number for each parameter and rank: where it lies tells whose it is."""
    return torch.full(shape, 100.0 * rank + list(SHAPES).index(name) + 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Gradients of some micro-batches. each: reduced after every one, not once at the end."""

    reduction: Reduction
    gradient: object = normal
    micro_batches: int = 1
    each: bool = False
    dtype: torch.dtype = torch.float32
    state: dict = field(default_factory=dict)


E4M3, E5M2, BF16, FP32 = (encoded(format=name, exclude=PLAIN) for name in ("E4M3", "E5M2", "BF16", "FP32"))
SHARED = shared_scale(exclude=PLAIN)
FULL = {"level": torch.zeros(2, dtype=torch.int64)}  # mu = 1

CASES = {
    **{name: Case(reduction=each) for name, each in (("e4m3", E4M3), ("e5m2", E5M2), ("bf16", BF16), ("fp32", FP32))},
    "shared": Case(reduction=SHARED),
    "identical": Case(reduction=E4M3, gradient=identical),
    "identical-shared": Case(reduction=SHARED, gradient=identical),
    "identical-shared-full": Case(reduction=SHARED, gradient=identical, state=FULL),
    "zeros": Case(reduction=E4M3, gradient=zeros),
    "zeros-shared": Case(reduction=SHARED, gradient=zeros),
    "silent": Case(reduction=E4M3, gradient=silent),
    "nan": Case(reduction=E4M3, gradient=not_a_number),
    "nan-fp32": Case(reduction=FP32, gradient=not_a_number),
    "nan-shared": Case(reduction=SHARED, gradient=not_a_number),
    "bf16-parameters": Case(reduction=FP32, dtype=torch.bfloat16),
    "bf16-parameters-e4m3": Case(reduction=E4M3, dtype=torch.bfloat16),
    "numbered": Case(reduction=FP32, gradient=numbered),
    "last": Case(reduction=FP32, micro_batches=3),
    "each": Case(reduction=FP32, micro_batches=3, each=True),
    "last-e4m3": Case(reduction=E4M3, micro_batches=3),
    "each-e4m3": Case(reduction=E4M3, micro_batches=3, each=True),
}
