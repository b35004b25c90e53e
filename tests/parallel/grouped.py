"""What a rank finds of the groups of a run: how long each waits at most, and the sockets."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lowprec_train.parallel.mesh import AXES, Mesh, Sizes
from lowprec_train.train import launch, rendezvous
from lowprec_train.train.launch import World

RANKS = 4
MINUTES = 0.7
LAYOUTS = {
    "sharded": Sizes(dp_shard=4),
    "replicated": Sizes(dp_replicate=4),
    "hybrid": Sizes(dp_replicate=2, dp_shard=2),
    "tensor": Sizes(dp_shard=2, tp=2),
}


def sockets() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)


def groups() -> dict[str, tuple[list[int], dict[str, float]]]:
    """{name: (ranks, {kind of device: minutes})} of every group of this process."""
    found = {}
    for group in c10d._world.pg_map:
        kinds = {device.type: group._get_backend(device) for device in group._device_types}
        seconds = {kind: backend.options._timeout.total_seconds() for kind, backend in kinds.items()}
        found[group.group_name] = (dist.get_process_group_ranks(group), {k: s / 60 for k, s in seconds.items()})
    return found


def seen(layout: str) -> dict:
    """Groups and sockets of one layout, as `main` and `build` make them."""
    before = sockets()
    mesh = Mesh(LAYOUTS[layout], "cpu", timedelta(minutes=MINUTES))
    axes = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES}
    beside = launch.host_group(MINUTES)
    assert beside is not None
    dist.barrier(beside)
    made = {"groups": groups(), "axes": axes, "dp": dist.get_process_group_ranks(mesh.dp_group)}
    made["sockets"] = sockets() - before
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return made


def work(rank: int, port: int) -> dict[str, dict]:
    """{layout: what it has}, on RANKS ranks that meet at a port as torchrun's do."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world, timeout = World(rank, RANKS, rank), timedelta(minutes=MINUTES)
    with rendezvous.met(world, timeout) as meeting, launch.joined(world, torch.device("cpu"), MINUTES, meeting.store):
        return {layout: seen(layout) for layout in LAYOUTS}


def on_gpus(rank: int, port: int) -> dict[str, Any]:
    """Two ranks, a GPU each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world, timeout = World(rank, 2, rank), timedelta(minutes=MINUTES)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with rendezvous.met(world, timeout) as meeting, launch.joined(world, device, MINUTES, meeting.store):
        mesh = Mesh(Sizes(dp_shard=2), "cuda", timeout)
        launch.host_group(MINUTES)
        names = {axis: mesh.group(axis).group_name for axis in AXES} | {"dp": mesh.dp_group.group_name}
        ones = torch.ones(3, device=device)
        dist.all_reduce(ones, group=mesh.dp_group)
        return {"groups": groups(), "names": names, "sum": ones.cpu()}
