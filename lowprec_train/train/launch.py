"""The processes of one run: how they find each other, and how what one of them knows becomes known to all.

torchrun says where a process stands (RANK, WORLD_SIZE, LOCAL_RANK); without it a run is one process, and nothing here
does anything. Rank 0 decides what only one can decide (the run directory, prepared data) and the others hear of it,
of its mistakes too: an error that one process meets alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands. rank: among `processes`; local_rank: among those of this machine."""

    rank: int = 0
    processes: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process decides, prints and writes."""
        return self.rank == 0


ALONE = World()


def world() -> World:
    """As the launcher set it; one process without a launcher."""
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return World(rank, processes, int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(world: World, device: torch.device, minutes: float) -> Iterator[None]:
    """The process group of all ranks: gloo for host tensors and, on GPUs, NCCL. Nothing for one process.

    minutes: after which a collective that waits ends the process.
    """
    if world.processes == 1:
        yield
        return
    on_gpu, timeout = device.type == "cuda", timedelta(minutes=minutes)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timeout,
        device_id=device if on_gpu else None,
        **(_meeting(world, timeout) if shared else {}),
    )
    yield
    dist.destroy_process_group()  # not after an error: the others may be waiting in a collective


def _meeting(world: World, timeout: timedelta) -> dict[str, Any]:
    """Where to meet under torchrun, whose store outlives its restarts and still holds the addresses of dead processes
    (pytorch#135712; it counts restarts by the machine, so a count is no name of the attempt).

    Every process says a token that was never used before, rank 0 answers each with the name of this attempt, and keys
    that begin with that name are new.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    name = _named(store, world.processes) if world.leads else _told(store, world.rank)
    return {"store": dist.PrefixStore(name, store), "rank": world.rank, "world_size": world.processes}


def _told(store: dist.Store, rank: int) -> str:
    """The name of the attempt, as rank 0 answers it."""
    token = secrets.token_hex(8)
    store.set(f"token/{rank}", token)
    name: str = store.get(f"answer/{token}").decode()
    store.add(f"heard/{name}", 1)
    return name


def _named(store: dist.Store, processes: int) -> str:
    """A new name of the attempt, once all others have heard it. Tokens of dead processes are answered too."""
    name = secrets.token_hex(8)
    answered: set[str] = set()
    while store.add(f"heard/{name}", 0) < processes - 1:
        spoken = [f"token/{rank}" for rank in range(1, processes) if store.check([f"token/{rank}"])]
        for token in {store.get(key).decode() for key in spoken} - answered:
            store.set(f"answer/{token}", name)
            answered.add(token)
        time.sleep(0.01)
    return name


def host_group(minutes: float) -> dist.ProcessGroup | None:
    """A new gloo group of all ranks, for one user: collectives of two threads must not meet in one group."""
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes)) if dist.is_initialized() else None


def first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `make` returns on rank 0, on every rank; or its exception. The result is pickled.

    group: of all ranks, where it is not the default one that shall carry it.
    """
    if not dist.is_initialized():
        return make()
    told: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            told = [(make(), None)]
        except Exception as mistake:
            told = [(None, mistake)]
    dist.broadcast_object_list(told, src=0, group=group)
    result, error = told[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def every(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What `make` returns on each rank, by rank, on every rank; or the exception of the first that met one. Pickled.

    group: as in `first`.
    """
    if not dist.is_initialized():
        return [make()]
    told: list[tuple[T | None, Exception | None]] = [(None, None)] * dist.get_world_size()
    try:
        mine: tuple[T | None, Exception | None] = (make(), None)
    except Exception as mistake:
        mine = (None, mistake)
    dist.all_gather_object(told, mine, group=group)
    for error in [error for _, error in told if error is not None]:
        raise error
    return [made for made, _ in told]  # type: ignore[misc]


def after_first(make: Callable[[], T]) -> T:
    """What `make` returns on each rank, called there after it returned on rank 0: what that prepared is found, not
    prepared again. An exception of rank 0 is raised on all.
    """
    made: list[T] = []
    first(lambda: made.append(make()))
    return made[0] if made else make()
