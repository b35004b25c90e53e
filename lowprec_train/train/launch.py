"""The processes of one run: join the process group, and broadcast the decisions of rank 0.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. Without them a run is one process, and this module does nothing. Rank 0
decides for all ranks (the run directory, prepared data) and broadcasts the result or the error: an error on one rank
alone would leave the others waiting in a collective.
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
    """The place of this process. rank: among all `processes`; local_rank: among the `local_processes` of this machine
    (None if the launcher does not set their number).
    """

    rank: int = 0
    processes: int = 1
    local_rank: int = 0
    local_processes: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0, which decides, prints and writes."""
        return self.rank == 0


ALONE = World()


def world() -> World:
    """Return the values that the launcher set; one process without a launcher."""
    rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not (rank.isdecimal() and local_rank.isdecimal() and processes.isdecimal() and int(rank) < int(processes)):
        values = f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={processes}"
        raise ValueError(f"the launcher set {values}, which do not fit together")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return World(int(rank), int(processes), int(local_rank), int(local) if local.isdecimal() and int(local) else None)


def check_one_process(command: str) -> None:
    """Raises ValueError if a launcher started several processes, which would repeat the work. command: its name."""
    if (processes := world().processes) > 1:
        raise ValueError(f"WORLD_SIZE={processes}: `{command}` is one process; call it without torchrun or srun")


def end_with_launcher(seconds: float = 1.0) -> None:
    """Under a launcher, end this process when the launcher has ended for any reason; otherwise it would run on and
    keep its GPU. Without a launcher do nothing. seconds: between two checks.
    """
    own_launcher = os.environ.get("LOWPREC_LAUNCHER")
    if not own_launcher and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(own_launcher or os.getppid())
    name = "lowprec train" if own_launcher else "torchrun"

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(seconds)
        if os.environ.get("LOCAL_RANK") == "0":
            with suppress(OSError):  # the launcher may have been the reader of this pipe
                text = f"error: {name}, process {launcher}, has ended; its ranks end too"
                print(text, file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()


@contextmanager
def joined(world: World, device: torch.device, minutes: float, store: dist.Store) -> Iterator[None]:
    """Join the process group of all ranks: gloo for host tensors and, on GPUs, NCCL. Does nothing for one process.

    minutes: timeout of a collective. store: the store where the ranks meet, with keys of this launch only.
    """
    on_gpu, timeout = device.type == "cuda", timedelta(minutes=minutes)
    if on_gpu:
        torch.cuda.set_device(device)  # FSDP2 uses the current device for its units
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
    dist.destroy_process_group()  # not after an error: other ranks may be waiting in a collective


def attempt(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a name of this launch that no earlier launch had, as the prefix of its keys in torchrun's store.

    The store outlives restarts and still has the addresses of dead processes (pytorch#135712). Its restart count is
    per machine, so it cannot name the launch.

    Each rank stores a new random token. Rank 0 answers each token with the name of this launch.
    """
    if world.leads:
        return _named(store, world.processes, timeout)
    token = secrets.token_hex(8)
    store.set(f"token/{world.rank}", token)
    name: str = store.get(f"answer/{token}").decode()
    store.add(f"heard/{name}", 1)
    return name


def _named(store: dist.Store, processes: int, timeout: timedelta) -> str:
    """Choose a name and return it once all other ranks have read it. Tokens of dead processes are answered too."""
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
            raise ValueError(f"ranks {late or 'of an earlier launch'} did not join the run within {timeout}")
        time.sleep(0.01)
    return name


def default_group() -> dist.ProcessGroup | None:
    """Return the default group, for host tensors on the main threads of all ranks; None for one process."""
    return dist.group.WORLD if dist.is_initialized() else None


def host_group(minutes: float) -> dist.ProcessGroup | None:
    """Create a gloo group of all ranks for a background thread. Ranks must start the collectives of a group in the same
    order, so two threads cannot share a group. It opens a socket to every other rank.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes)) if dist.is_initialized() else None


def first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `make` on rank 0; return its result, or raise its exception, on every rank. The result is pickled.

    group: of all ranks; None: the default group.
    """
    if not dist.is_initialized():
        return make()
    outcomes = [_outcome(make) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcomes, src=0, group=group)
    return _results(outcomes)[0]


def every(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `make` on every rank; return all results by rank, or raise the first exception. Results are pickled.

    group: as in `first`.
    """
    if not dist.is_initialized():
        return [make()]
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(make), group=group)
    return _results(outcomes)


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, exception). An exception that cannot be pickled becomes a RuntimeError with its type and text."""
    try:
        return make(), None
    except Exception as mistake:
        try:
            pickle.dumps(mistake)
        except Exception:
            return None, RuntimeError(f"{type(mistake).__name__}: {mistake}")
        return None, mistake


def _results(outcomes: list[Any]) -> list[Any]:
    """Return the results, or raise the first exception."""
    for error in (error for _, error in outcomes if error is not None):
        raise error
    return [made for made, _ in outcomes]


def after_first(make: Callable[[], T]) -> T:
    """Call `make` on rank 0, then on the other ranks, which find what rank 0 prepared. Returns the rank's own result.
    An exception on rank 0 is raised on all ranks.
    """
    made: list[T] = []
    first(lambda: made.append(make()))
    return made[0] if made else make()
