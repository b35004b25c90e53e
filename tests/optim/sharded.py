"""AdamW on the parameters of `fully_shard` on two processes, and the same on one."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.optim.norm import norm_and_squares
from lowprec_train.optim.optimizer import parameter_groups
from lowprec_train.optim.shard import Shard, local
from tests.optim.cases import SYSTEMS, build

RANKS, STEPS, ROWS = 2, 3, 6
WIDTHS = (32, 5, 64, 1)  # matrices [5, 32], [64, 5] and [1, 64]: uneven over two ranks, and empty on the second
DEEP = (32, *[16] * 12, 1)  # 13 matrices and as many vectors


class Layer(nn.Module):
    """A matrix and a vector; computes in FP32 whatever the matrix is stored in."""

    def __init__(self, columns, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x):
        return (x @ self.weight.float().t() + self.bias).sin()


def network(widths=WIDTHS):
    torch.manual_seed(4)
    return nn.Sequential(*(Layer(*pair) for pair in pairwise(widths)))


def inputs(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTHS[0], generator=generator)


def train(system, net, shards, micro_batches, sum_vectors, gather):
    """What `gather` finds after each step, with the norms and the roundings that an observer was told of."""
    adamw = build(parameter_groups(net, 0.1), system, lr=1e-2, shards=shards)
    named, history = dict(net.named_parameters()), []
    for step in range(STEPS):
        for rank in micro_batches:
            net(inputs(step, rank)).square().sum().backward()
        sum_vectors([p.grad for p in named.values() if p.ndim == 1])
        norm = norm_and_squares(named.values(), shards)[0]
        seen = []
        watch = (lambda p, what, *_, seen=seen: seen.append(what)) if step == 1 else None
        rms = adamw.update_rms(grad_scale=norm * 2)
        adamw.step(grad_scale=norm * 2, found_inf=(~norm.isfinite()).float(), observer=watch)
        adamw.zero_grad()
        found = {(name, "value"): local(p).float() for name, p in named.items()}
        found |= {(name, key): x for name, p in named.items() for key, x in adamw.state[p].items()}
        told = {"norm": norm, "seen": len(seen), "rms": torch.stack([rms[p] for p in named.values()])}
        history.append(told | gather({key: x.clone() for key, x in found.items()}))
    return history


def on_one():
    return {name: train(name, network(), None, range(RANKS), lambda _: None, dict) for name in SYSTEMS}


def sharded(master_is_bf16, mesh, widths=WIDTHS):
    """Matrices cut by FSDP2, gradients FP32 sums, vectors left alone."""
    net, wide = network(widths), torch.bfloat16 if master_is_bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=wide, reduce_dtype=torch.float32, cast_forward_inputs=False)
    vectors = {p for p in net.parameters() if p.ndim == 1}
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=vectors)
    fully_shard(net, mesh=mesh, mp_policy=policy, ignored_params=vectors)
    for module in (net, *net):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return net


def shard_of(parameter, rank, group):
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Shard(shape=shape, first=(0,) * len(shape), local=shape, group=None)
    here, each = tuple(parameter.to_local().shape), -(-shape[0] // RANKS)
    return Shard(shape=shape, first=(min(rank * each, shape[0]), 0), local=here, group=DistributedGroup.of(group))


def sum_over_ranks(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)


class Counted(TorchDispatchMode):
    """Ops that are dispatched, collectives too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


def ops_of_a_step(system, widths, mesh, rank):
    """Of AdamW with update clipping, the names of all ops of the second step."""
    net = sharded(SYSTEMS[system][2] != "fp32", mesh, widths)
    shards = {p: shard_of(p, rank, mesh.get_group()) for p in net.parameters()}
    adamw = build(parameter_groups(net, 0.1), system, clip_updates=True, shards=shards)
    scalars = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    for _ in range(2):
        net(inputs(0, rank)).square().sum().backward()
        with Counted() as counted:
            adamw.step(**scalars)
        adamw.zero_grad()
    return counted.names


def refusal(net):
    """The message about DTensors without shards."""
    try:
        build(parameter_groups(net, 0.1), "adamw")
    except ValueError as error:
        return str(error)


def work(rank):
    """{system: its run} on a rank, and a refusal."""
    mesh, results = init_device_mesh("cpu", (RANKS,)), {}
    for name, (_, _, master) in SYSTEMS.items():
        net = sharded(master != "fp32", mesh)
        shards = {p: shard_of(p, rank, mesh.get_group()) for p in net.parameters()}
        results[name] = train(name, net, shards, [rank], sum_over_ranks, dict)
    for name in ("adamw_fp4", "adamw_fp8lm"):
        results[f"ops of {name}"] = [ops_of_a_step(name, widths, mesh, rank) for widths in (WIDTHS, DEEP)]
    return results | {"refusal": refusal(sharded(False, mesh))}
