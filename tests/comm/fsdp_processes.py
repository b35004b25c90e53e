"""What a rank does in the tests of FSDP2's hooks: every case of fsdp_cases.py in every layout."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lowprec_train.comm import fsdp
from lowprec_train.comm.axis import Axis
from lowprec_train.comm.fsdp import attach, managed
from tests.comm.fsdp_cases import CASES, FROZEN, LAYOUTS, SHAPES, VECTOR, build, normal
from tests.comm.processes import RowsInFiles

POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def sharded(mesh, dtype):
    """The model; its vectors are left to whoever sums vectors."""
    model = build(dtype).to(mesh.device_type)
    vectors = {p for p in model.parameters() if p.ndim == 1}
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh["dp_shard"], mp_policy=POLICY, ignored_params=vectors)
    return model


def attached(model, mesh, reduction, **more):
    groups = {"shard_group": mesh.get_group("dp_shard"), "replica_group": mesh.get_group("dp_replicate")}
    return attach(model, reduction=reduction, **groups, **more)


def constants(case, rank, micro, device):
    own = {name: case.gradient(rank, micro, name, shape).to(device) for name, shape in SHAPES.items()}
    ones = {name: torch.ones((), device=device) for name in (VECTOR, VECTOR.replace("0", "1"))}
    nothing = {"head.weight": torch.zeros((), device=device)}  # tied to embedding.weight
    frozen = {FROZEN.replace("1", str(i)): torch.ones((), device=device) for i in range(2)}
    return {**own, **ones, **nothing, **frozen}


def backward(model, case, rank, device):
    for micro in range(case.micro_batches):
        model.set_requires_gradient_sync(case.each or micro == case.micro_batches - 1)
        model(constants(case, rank, micro, device)).backward()


def run(case, mesh, rank, **more):
    """Whole gradients as this rank's shard axis holds them, the step's metrics, and the state after it."""
    model = sharded(mesh, case.dtype)
    reducer = attached(model, mesh, case.reduction, **more)
    if case.state:
        reducer.load_state_dict({"ranks": reducer.state_dict()["ranks"], **case.state})
    backward(model, case, rank, mesh.device_type)
    reducer.end_backward()
    reducer.finish_step()
    named = dict(model.named_parameters())
    return {
        "in flight": reducer._in_flight._held,
        "gradients": {name: named[name].grad.full_tensor().cpu() for name in SHAPES},
        "vector": named[VECTOR].grad.cpu(),
        "metrics": {name: float(value) for name, value in reducer.metrics().items()},
        "state": {name: value.cpu() for name, value in reducer.state_dict().items()},
    }


READ = ("e4m3", "e5m2", "each-e4m3", "bf16-parameters-e4m3")


def read_by_peers(meshes, rank):
    """Results of `READ` where ranks of a shard group read each other's gradients, on CPUs from files."""
    if meshes["shard"].device_type == "cpu":
        fsdp.SymmetricRows = RowsInFiles
    return {
        (name, case): run(CASES[case], mesh, rank, symmetric_memory=True)
        for name, mesh in meshes.items()
        for case in READ
    }


def buffers(mesh, rank):
    """The gradients that reduce-scatters were given, a unit at a time, with the layouts that they were told."""
    seen, original = [], Axis.reduce_scatter

    def recording(self, gradients, out, layout):
        given = [gradient.cpu().clone() for gradient in gradients]
        seen.append((given, [each.size for each in layout.ranges], [each.coded for each in layout.ranges]))
        return original(self, gradients, out, layout)

    Axis.reduce_scatter = recording
    run(CASES["numbered"], mesh, rank)
    Axis.reduce_scatter = original
    return seen


def orders(mesh):
    """Names of every unit's parameters as `managed` tells them, blocks first."""
    model = sharded(mesh, torch.float32)
    names = {module: name for name, module in model.named_modules()}
    return [list(managed(unit, names)) for unit in (*model.blocks, model)]


def without(name, mesh, rank):
    """The message of a backward pass in which one parameter has no gradient; None if it passes."""
    model, case = sharded(mesh, torch.float32), CASES["fp32"]
    attached(model, mesh, case.reduction)
    try:
        model(constants(case, rank, 0, mesh.device_type) | {name: None}).backward()
    except ValueError as error:
        return str(error)
    return None


def followed(mesh, rank, steps=40):
    """Metrics of several steps of one reducer, step by step."""
    model, history = sharded(mesh, torch.float32), []
    reducer, case = attached(model, mesh, CASES["shared"].reduction), CASES["shared"]
    for _ in range(steps):
        history.append(stepped(model, reducer, case, mesh, rank))
    return history, reducer.state_dict()


def stepped(model, reducer, case, mesh, rank):
    """Metrics of a step."""
    backward(model, case, rank, mesh.device_type)
    model.zero_grad()
    reducer.end_backward()
    reducer.finish_step()
    return {name: float(value) for name, value in reducer.metrics().items()}


def interrupted(mesh, rank, cuts):
    """Metrics of 36 steps, each with gradients of its own, of one reducer; at `cuts` another goes on from its state."""
    found = {}
    for name in ("e4m3", "shared"):
        model, found[name] = sharded(mesh, torch.float32), []
        reducer = attached(model, mesh, CASES[name].reduction)
        for step in range(36):
            if step in cuts:
                before, reducer = reducer, attached(model, mesh, CASES[name].reduction)
                reducer.load_state_dict(before.state_dict())
                reducer.sampling.load_state_dict(before.sampling.state_dict())
            case = replace(CASES[name], gradient=lambda rank, _, *which: normal(rank, step, *which))  # noqa: B023
            found[name].append(stepped(model, reducer, case, mesh, rank))
    return found


def resumed(meshes):
    """mu after loading, in every layout, a state that ended at level -5 in another."""
    found = {}
    for name, mesh in meshes.items():
        reducer = attached(sharded(mesh, torch.float32), mesh, CASES["shared"].reduction)
        for other, (replicas, shards) in LAYOUTS.items():
            reducer.load_state_dict({"level": torch.tensor([-5, -5]), "ranks": torch.tensor([shards, replicas])})
            found[name, other] = reducer.state_dict()["level"].tolist()
            reducer = attached(sharded(mesh, torch.float32), mesh, CASES["shared"].reduction)
    return found


def everything(rank, device):
    meshes = {
        name: init_device_mesh(device, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
        for name, sizes in LAYOUTS.items()
    }
    results = {(name, case): run(CASES[case], mesh, rank) for name, mesh in meshes.items() for case in CASES}
    results["read by peers"] = read_by_peers(meshes, rank)
    results["buffers"], results["orders"] = buffers(meshes["shard"], rank), orders(meshes["shard"])
    results["without"] = without("blocks.1.second.cube", meshes["shard"], rank)
    results["followed"], results["resumed"] = followed(meshes["hybrid"], rank), resumed(meshes)
    results["alone"], results["parts"] = (interrupted(meshes["hybrid"], rank, cuts) for cuts in ((), (5, 16, 23)))
    return results
