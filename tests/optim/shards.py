"""Weights cut into shards, their groups on threads, and the shards' state put together again."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from lowprec_train.optim.shard import Shard
from tests.groups import Recorded, thread_groups
from tests.optim.cases import build

# name -> shape; odd rows, fewer rows than ranks, segments of one and of several groups, a matrix of a batch's shape
SHAPES = {
    "embedding": (24, 64),
    "weight": (37, 128),
    "wide": (6, 2048),
    "low": (3, 64),
    "deep": (4, 3, 128),
    "bias": (64,),
    "norm": (48,),
}
TIMEOUT = 60


class Cut:
    """The layout of rows x columns ranks, which cut `SHAPES`: columns first, then the rows of each part as torch.chunk
    does. "norm" is whole everywhere, "bias" is cut over the columns' ranks alone.
    """

    def __init__(self, rows, columns):
        self.rows, self.columns, self.count = rows, columns, rows * columns
        self.everyone = [Recorded(group) for group in thread_groups(self.count)]
        beside = [thread_groups(columns) for _ in range(rows)]
        self.beside = [beside[rank // columns][rank % columns] for rank in range(self.count)]

    def shard(self, name, rank):
        shape, first, local = SHAPES[name], [0] * len(SHAPES[name]), list(SHAPES[name])
        if name == "norm":
            return Shard(shape=shape, first=tuple(first), local=tuple(local), group=None)
        local[-1] //= self.columns
        first[-1] = rank % self.columns * local[-1]
        if len(shape) > 1:
            each = -(-shape[0] // self.rows)
            first[0] = min(rank // self.columns * each, shape[0])
            local[0] = min(each, shape[0] - first[0])
        group = self.everyone[rank] if len(shape) > 1 else self.beside[rank]
        return Shard(shape=shape, first=tuple(first), local=tuple(local), group=group)

    def part(self, name, rank, whole):
        shard = self.shard(name, rank)
        for dim, (start, size) in enumerate(zip(shard.first, shard.local, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole.clone()

    def joined(self, name, parts, shape):
        """The parts of all ranks as one tensor of `shape`; vectors are the same in every row of ranks."""
        if name == "norm":
            assert all(same(part, parts[0]) for part in parts)
            return parts[0]
        parts = [part.view(torch.uint8) if part.element_size() == 1 else part for part in parts]
        strips = [torch.cat(parts[at : at + self.columns], dim=-1) for at in range(0, self.count, self.columns)]
        return strips[0].view(shape) if len(SHAPES[name]) == 1 else torch.cat(strips).view(shape)

    def on_threads(self, work):
        """[work(rank) for every rank], all at once."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(work, range(self.count), timeout=2 * TIMEOUT))


def first_weights():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in SHAPES.items()}


def gradients(step):
    """Rows and columns of sizes of their own, and tensors too; some zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    made = {}
    for place, (name, shape) in enumerate(SHAPES.items()):
        drawn = torch.randn(shape, generator=generator) * torch.logspace(-3, 0, shape[-1]) * 2.0 ** (3 - 2 * place)
        made[name] = drawn * (torch.rand(shape, generator=generator) > 0.1)
    return made


def optimizer(weights, system, shards=None, **options):
    """(parameters by name, AdamW over them); the embedding's master stays FP32."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    cut = None if shards is None else {parameters[name]: shard for name, shard in shards.items()}
    group = {"params": list(parameters.values()), "weight_decay": 0.1, "indexed": [0]}
    return parameters, build([group], system, lr=1e-2, seed=5, shards=cut, **options)


def advance(parameters, adamw, given, *, found=0.0, observer=None):
    for name, parameter in parameters.items():
        parameter.grad = given[name].clone()
    scalars = {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(found)}
    adamw.step(**scalars, observer=observer)


def tensors(parameters, adamw):
    """(parameter, key) -> a copy; the parameter itself under the key "value"."""
    found = {(name, "value"): parameter.detach() for name, parameter in parameters.items()}
    found |= {(name, key): x for name, p in parameters.items() for key, x in adamw.state[p].items()}
    return {key: x.clone() for key, x in found.items()}


def together(cut, parts, along, whole):
    """What the ranks hold, put together as `whole` holds it. along: shapes of what is cut, as `AdamW.along`."""
    joined = {}
    for (name, key), wanted in whole.items():
        each = [part[name, key] for part in parts]
        if key == "value" or key in along[name]:
            joined[name, key] = cut.joined(name, each, wanted.shape)
        else:
            assert all(same(one, each[0]) for one in each), (name, key)
            joined[name, key] = each[0]
    return joined


def along(parameters, adamw):
    """By name; a matrix is stored as [n, k]."""
    flat = {name: (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape for name, shape in SHAPES.items()}
    return {name: adamw.along(parameter, flat[name]) for name, parameter in parameters.items()}


def same(left, right):
    """Bit for bit."""
    if left.dtype == torch.uint8 or right.dtype == torch.uint8:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (left, right)))


def differences(left, right):
    """The keys whose tensors differ, with how many elements do."""
    assert left.keys() == right.keys()
    return {key: left[key].shape for key in left if not same(left[key], right[key])}
