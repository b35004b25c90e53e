"""The processes of one run: joining the process group, and broadcasting decisions of rank 0.

torchrun says where a process stands (RANK, WORLD_SIZE, LOCAL_RANK); without it a run is one process, and this module
does nothing. Rank 0 makes the decisions for all (the run directory, prepared data) and broadcasts them, errors
included: an error on one process alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Where this process stands. rank: among `processes`; local_rank: among those of this machine, which are
    `local_processes`; None where the launcher does not say.
    """

    rank: int = 0
    processes: int = 1
    local_rank: int = 0
    local_processes: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this process decides, prints and writes."""
        return self.rank == 0


ALONE = World()


def world() -> World:
    """As the launcher set it; one process without a launcher."""
    rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not (rank.isdecimal() and local_rank.isdecimal() and processes.isdecimal() and int(rank) < int(processes)):
        raise ValueError(f"the launcher's RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={processes} fit no process")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return World(int(rank), int(processes), int(local_rank), int(local) if local.isdecimal() and int(local) else None)


def end_with_launcher(seconds: float = 1.0) -> None:
    """Under a launcher, end this process when that has ended, however that was: nothing else would, and it would
    keep its GPU. A run that a shell started outlives the shell. seconds: between two looks.
    """
    ours = os.environ.get("LOWPREC_LAUNCHER")
    if not ours and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher, name = int(ours or os.getppid()), "lowprec train" if ours else "torchrun"

    def look() -> None:
        while os.getppid() == launcher:
            time.sleep(seconds)
        if os.environ.get("LOCAL_RANK") == "0":
            with suppress(OSError):  # the launcher may have read what is written here
                text = f"error: {name}, process {launcher}, has ended, and its ranks with it"
                print(text, file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="launcher").start()


@contextmanager
def joined(world: World, device: torch.device, minutes: float, store: dist.Store) -> Iterator[None]:
    """The process group of all ranks: gloo for host tensors and, on GPUs, NCCL. Nothing for one process.

    minutes: after which a collective that waits ends the process. store: where they meet, with keys of this launch.
    """
    on_gpu, timeout = device.type == "cuda", timedelta(minutes=minutes)
    if on_gpu:
        torch.cuda.set_device(device)  # FSDP2 takes the current device for that of its units
    if world.processes == 1:
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timeout,
        device_id=device if on_gpu else None,
        store=store,
        rank=world.rank,
        world_size=world.processes,
    )
    yield
    dist.destroy_process_group()  # not after an error: the others may be waiting in a collective


def attempt(store: dist.Store, world: World, timeout: timedelta) -> str:
    """A name of this launch that no earlier one had, for keys of torchrun's store.

    The store outlives restarts and still holds the addresses of dead processes (pytorch#135712; it counts restarts by
    the machine, so a count is no name of the attempt).

    Every process says a token that was never used before, rank 0 answers each with the name of this attempt, and keys
    that begin with that name are new.
    """
    if world.leads:
        return _named(store, world.processes, timeout)
    token = secrets.token_hex(8)
    store.set(f"token/{world.rank}", token)
    name: str = store.get(f"answer/{token}").decode()
    store.add(f"heard/{name}", 1)
    return name


def _named(store: dist.Store, processes: int, timeout: timedelta) -> str:
    """A new name of the attempt, once all others have heard it. Tokens of dead processes are answered too."""
    until = time.monotonic() + timeout.total_seconds()
    name = secrets.token_hex(8)
    answered: set[str] = set()
    while store.add(f"heard/{name}", 0) < processes - 1:
        spoken = [f"token/{rank}" for rank in range(1, processes) if store.check([f"token/{rank}"])]
        for token in {store.get(key).decode() for key in spoken} - answered:
            store.set(f"answer/{token}", name)
            answered.add(token)
        if time.monotonic() > until:
            late = [rank for rank in range(1, processes) if not store.check([f"token/{rank}"])]
            raise ValueError(
                f"ranks {late or 'of an earlier launch'} did not come to the start of the run in {timeout}"
            )
        time.sleep(0.01)
    return name


def everyone() -> dist.ProcessGroup | None:
    """The default group, in which the main threads of all ranks exchange host tensors; None for one process."""
    return dist.group.WORLD if dist.is_initialized() else None


def host_group(minutes: float) -> dist.ProcessGroup | None:
    """A new gloo group of all ranks, for a thread beside the main one: ranks must begin the collectives of a group in
    one order, and two threads have none. It costs a socket to every other rank.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes)) if dist.is_initialized() else None


def first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `make` returns on rank 0, on every rank; or its exception. The result is pickled.

    group: of all ranks, where it is not the default one that shall carry it.
    """
    if not dist.is_initialized():
        return make()
    told = [_outcome(make) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0, group=group)
    return _results(told)[0]


def every(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What `make` returns on each rank, by rank, on every rank; or the exception of the first that met one. Pickled.

    group: as in `first`.
    """
    if not dist.is_initialized():
        return [make()]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _outcome(make), group=group)
    return _results(told)


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it returns, or its exception; of one that cannot be pickled, as those of compilers, its type and text."""
    try:
        return make(), None
    except Exception as mistake:
        try:
            pickle.dumps(mistake)
        except Exception:
            return None, RuntimeError(f"{type(mistake).__name__}: {mistake}")
        return None, mistake


def _results(told: list[Any]) -> list[Any]:
    """Of outcomes; raises the first exception."""
    for error in (error for _, error in told if error is not None):
        raise error
    return [made for made, _ in told]


def after_first(make: Callable[[], T]) -> T:
    """What `make` returns on each rank, called there after it returned on rank 0: what that prepared is found, not
    prepared again. An exception of rank 0 is raised on all.
    """
    made: list[T] = []
    first(lambda: made.append(make()))
    return made[0] if made else make()
