"""The ranks of one launch before and beside their process group: what they tell each other through torchrun's store.

    meet        every launch under a name that was never used, for the store outlives restarts (decision 0021)
    agreed      configurations and versions are compared before anything is built
    tell        an error that many ranks share is printed by one of them

The store answers when ranks hang, rank 0 among them: torchrun's agent keeps it. Without torchrun rank 0 does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from omegaconf.errors import OmegaConfBaseException

from lowprec_train.train.diagnostics import failure
from lowprec_train.train.launch import World, attempt

T = TypeVar("T")
PATIENCE = 5.0  # seconds in which rank 0 has said what is wrong with all
MAY_DIFFER = ("data.cache", "debug")  # a directory of the node's own; how errors are shown
DEFAULT_MINUTES = 10.0  # for ranks that have no configuration yet
MOST = 4  # differing keys that an error lists


class Rendezvous:
    """The processes of one launch, through a store that all of them reach.

    store: its keys are of this launch alone. again: opens another connection to it, for a thread that must not wait for
    the others' requests.
    """

    def __init__(self, world: World, store: dist.Store, again: Callable[[], dist.Store] | None = None) -> None:
        self.world, self.store = world, store
        self.again = again or (lambda: store)

    def all(self, key: str) -> list[str]:
        """What each rank has set `key/RANK` to, in rank order. Waits for all; ValueError names those that are late."""
        keys = [f"{key}/{rank}" for rank in range(self.world.processes)]
        try:
            self.store.wait(keys)
        except dist.DistError:
            late = [rank for rank, each in enumerate(keys) if not self.store.check([each])]
            raise ValueError(f"{numbered(late)} did not come to the start of the run in time") from None
        return [self.store.get(each).decode() for each in keys]

    def tell(self, text: str, *, alone: bool = False) -> None:
        """Print an error: once where ranks share it, numbers aside. Rank 0 is first, if it meets it at all.

        alone: this rank speaks for all.
        """
        speaks, until = alone or self.world.leads, time.monotonic() + PATIENCE
        try:
            while not (speaks or self.store.check(["told"]) or time.monotonic() > until):
                time.sleep(0.05)
            first = self.claim(text)
        except dist.DistError:  # who keeps the store has ended
            first = True
        named = first and not speaks
        failure.report(f"error{f' on rank {self.world.rank}' if named else ''}: {text}", printed=first)
        with suppress(dist.DistError):
            self.store.set("told", str(self.world.rank))

    def claim(self, text: str) -> bool:
        """Whether no rank has told this yet, numbers aside; from now on one has."""
        same = hashlib.sha256(re.sub(r"\d+", "0", text).encode()).hexdigest()
        return self.store.add(f"told/{same}", 1) == 1


@contextmanager
def met(world: World, timeout: timedelta) -> Iterator[Rendezvous]:
    """All ranks of this launch. Raises ValueError where one does not come within `timeout`."""
    if world.processes == 1:
        yield Rendezvous(world, dist.HashStore())
        return
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ValueError(
            f"WORLD_SIZE={world.processes}, but MASTER_ADDR={address}, MASTER_PORT={port}: torchrun sets both"
        )

    def connected(serves: bool = False) -> dist.Store:
        return dist.TCPStore(address, int(port), is_master=serves, timeout=timeout, wait_for_workers=False)

    try:
        store = connected(world.leads and not shared)
        name = attempt(store, world, timeout) if shared else "run"
    except dist.DistError:
        raise ValueError(f"rank 0 did not come to the start of the run within {timeout}") from None
    yield Rendezvous(world, dist.PrefixStore(name, store), lambda: dist.PrefixStore(name, connected()))


def agreed(ranks: Rendezvous, make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """What `make` returns on this rank, where its facts are the same on all. Compared by rank 0, in one round.

    Raises ValueError on all ranks, with the same text: the facts that differ with their values and ranks, or what
    `make` raised on any of them.
    """
    if ranks.world.processes == 1:
        return make()
    error: Exception | None = None
    said: dict[str, Any]
    try:
        made = make()
        said = {"facts": {key: _text(value) for key, value in facts(made).items() if key not in MAY_DIFFER}}
    except Exception as mistake:
        error, said = mistake, {"error": str(mistake)}
    verdict = compared(ranks, said)
    if error is not None and not isinstance(error, ValueError | OSError | OmegaConfBaseException):
        raise error
    if verdict:
        raise ValueError(verdict) from error
    return made


def compared(ranks: Rendezvous, said: Mapping[str, Any]) -> str:
    """What is wrong with what ranks say, `{"facts": ...}` or `{"error": ...}`; empty where all facts are the same."""
    rank = ranks.world.rank
    ranks.store.set(f"facts/{rank}", json.dumps(said, sort_keys=True))
    if ranks.world.leads:
        ranks.store.set("verdict", verdict([json.loads(each) for each in ranks.all("facts")]))
    try:
        return ranks.store.get("verdict").decode()
    except dist.DistError:
        raise ValueError("rank 0 did not say whether all ranks have the same configuration") from None


def refused(world: World, text: str) -> None:
    """Tell the others what this rank has against its command line, and print it once. Ranks that have nothing against
    theirs raise it from `agreed`.
    """
    with met(world, timedelta(minutes=DEFAULT_MINUTES)) as ranks:
        ranks.tell(compared(ranks, {"error": text}))


def minutes(asked: float) -> timedelta:
    """How long ranks wait for each other before their configuration is checked."""
    return timedelta(minutes=asked if 0 < asked < 1e6 else DEFAULT_MINUTES)


class Refusal:
    """What is written to stderr before a job begins, by all ranks alike: kept back, and printed by one.

    file: where it goes to.
    """

    def __init__(self, world: World) -> None:
        self._world, self._real, self._inside = world, sys.stderr, False
        self.file = io.StringIO()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it stderr is `file`."""
        with redirect_stderr(self.file):
            yield

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Within it, a job that has begun, stderr is itself."""
        self._inside = True
        with redirect_stderr(self._real):
            yield
        self._inside = False

    def print_once(self, end: SystemExit, explain: Callable[[str], str]) -> None:
        """After the error exit of a command line that no job came of, or of a job that broke. explain: what is wrong
        with the command line, from what was written.
        """
        if self._inside or not end.code:
            print(self.file.getvalue(), file=self._real, end="")
        else:
            refused(self._world, explain(self.file.getvalue()))


def verdict(said: list[dict[str, Any]]) -> str:
    """Of what each rank says, in rank order: as `compared` returns it."""
    errors = _by_value(each.get("error") for each in said)
    if len(errors) == 1 and None not in errors:
        return str(next(iter(errors)))
    if mistakes := {text: ranks for text, ranks in errors.items() if text is not None}:
        return "\n".join(f"{text} ({numbered(ranks)} only)" for text, ranks in mistakes.items())
    keys = sorted({key for each in said for key in each["facts"]})
    values = {key: _by_value(each["facts"].get(key, "(absent)") for each in said) for key in keys}
    differing = {key: found for key, found in values.items() if len(found) > 1}
    if not differing:
        return ""
    lines = [
        f"  {key}: " + "; ".join(f"{value} on {numbered(ranks)}" for value, ranks in found.items())
        for key, found in list(differing.items())[:MOST]
    ]
    rest = [f"  and {len(differing) - MOST} more"] if len(differing) > MOST else []
    return "\n".join(["the ranks of this run were started with different configurations:", *lines, *rest])


def source_hash() -> str:
    """Of the package's Python files: nodes may have different checkouts."""
    package = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        total.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return total.hexdigest()[:8]


def numbered(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2 and 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    many = sum(map(len, runs)) > 1
    return f"rank{'s' if many else ''} " + " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _by_value(values: Iterable[str | None]) -> dict[str | None, list[int]]:
    found: defaultdict[str | None, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        found[value].append(rank)
    return dict(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
