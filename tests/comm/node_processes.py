"""What a rank does in the tests of nodes: four ranks on two nodes of two, over gloo."""

import torch
import torch.distributed as dist

from lowprec_train.comm import collectives
from lowprec_train.comm.axis import Axis
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.fsdp import attach
from lowprec_train.numerics.formats import E4M3
from lowprec_train.parallel.mesh import Mesh, Sizes
from tests.comm.cases import CASES, gradients, row
from tests.comm.fsdp_cases import CASES as MODELS
from tests.comm.fsdp_cases import SHAPES
from tests.comm.fsdp_processes import backward, sharded

NODE = 2
MODEL_CASES = ("fp32", "e4m3", "bf16", "nan", "each-e4m3", "shared")


class Links:
    """Bytes that this rank hands to collectives, by whether they may leave its node."""

    def __init__(self, nodes):
        self.sent = {"nvlink": 0, "nic": 0}
        self._link = {nodes.inside: "nvlink", nodes.across: "nic"}
        self._exchange, self._gather = dist.all_to_all_single, collectives.ALL_GATHER

    def __enter__(self):
        dist.all_to_all_single, collectives.ALL_GATHER = (
            self._counted(self._exchange, 1),
            self._counted(self._gather, 0),
        )
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, collectives.ALL_GATHER = self._exchange, self._gather

    def _counted(self, collective, split):
        def counted(out, given, group=None):
            ranks = dist.get_world_size(group)
            self.sent[self._link[group]] += given.numel() * (ranks - 1) // (ranks if split else 1)
            return collective(out, given, group=group)

        return counted


def reduced(case, nodes, rank):
    """(this rank's result, bytes by link) of a case of tests/comm/cases.py."""
    with Links(nodes) as links:
        total = getattr(collectives, case.kind)(
            case.given(rank), nodes, case.codec, case.layout, mu=torch.tensor(case.mu)
        ).total
    return total, links.sent


def measured(nodes, rank, rows=4):
    """(signal, noise) of reduce-scatters whose first row is a thousandth of the others, each row measured in turn."""
    layout, found = row(2048), []
    for sample in range(rows):
        axis = Axis(nodes, BlockScaledCodec(E4M3), "cpu")
        axis.begin_step(sample)
        flat = gradients(rows * 2048, seed=9, spread=1.0)[rank]
        flat[:2048] *= 1e-3
        axis.reduce_scatter([flat], torch.empty(2048), layout)
        found.append(axis.energy)
    return torch.stack(found)


def trained(name, mesh, rank):
    """Whole gradients and metrics of a model over two nodes."""
    case, model = MODELS[name], sharded(mesh.device_mesh, torch.float32)
    reducer = attach(model, reduction=case.reduction, shard_group=mesh.nodes("dp_shard"))
    backward(model, case, rank, "cpu")
    reducer.end_backward()
    reducer.finish_step()
    gradients = {key: p.grad.full_tensor() for key, p in model.named_parameters() if key in SHAPES}
    return gradients, {key: float(value) for key, value in reducer.metrics().items()}


def work(rank):
    mesh = Mesh(Sizes(dp_shard=4), "cpu", node_size=NODE)
    nodes = mesh.nodes("dp_shard")
    unequal = Mesh(Sizes(dp_shard=4), "cpu", node_size=2 if rank < 2 else 1).nodes("dp_shard")
    assert (unequal.node, unequal.inside) == (1, None), "unequal nodes are exchanged flat"
    found = {"places": (nodes.count, dist.get_rank(nodes.inside), dist.get_rank(nodes.across))}
    exact = [name for name, case in CASES.items() if not case.codec.shares_scales]
    found |= {name: reduced(CASES[name], nodes, rank) for name in exact}
    found["measured"] = measured(nodes, rank)
    return found | {("model", name): trained(name, mesh, rank) for name in MODEL_CASES}
