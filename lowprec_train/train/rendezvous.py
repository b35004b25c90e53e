"""Communication between the ranks of a launch without the process group, through torchrun's store.

    met         connects the ranks under a new key prefix, because the store outlives restarts (decision 0021)
    agreed      rank 0 compares configurations and versions before anything is built
    tell        prints an error that several ranks share once

The agent of torchrun keeps the store, so it answers even if ranks hang. Without torchrun rank 0 keeps it.
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
PATIENCE = 5.0  # seconds for rank 0 to report an error that all ranks share
MAY_DIFFER = ("data.cache", "debug")  # keys that ranks need not share: a node-local directory, the form of errors
DEFAULT_MINUTES = 10.0  # timeout for ranks without a configuration
MOST = 4  # differing keys that an error lists


class Rendezvous:
    """The ranks of one launch, connected by a store.

    store: with keys of this launch only. connect: opens another connection to it, for a thread that must not wait for
    requests of other threads.
    """

    def __init__(self, world: World, store: dist.Store, connect: Callable[[], dist.Store] | None = None) -> None:
        self.world, self.store = world, store
        self.connect = connect or (lambda: store)

    def all(self, key: str) -> list[str]:
        """Return what each rank has stored as `key/RANK`, in rank order. Raises ValueError if ranks are missing."""
        keys = [f"{key}/{rank}" for rank in range(self.world.processes)]
        try:
            self.store.wait(keys)
        except dist.DistError:
            late = [rank for rank, each in enumerate(keys) if not self.store.check([each])]
            raise ValueError(f"{numbered(late)} did not join the run in time") from None
        return [self.store.get(each).decode() for each in keys]

    def report(self, text: str, *, alone: bool = False) -> None:
        """Print an error once if several ranks share it. Numbers are ignored. If rank 0 has it, rank 0 prints it.

        alone: print without waiting for rank 0.
        """
        at_once, until = alone or self.world.leads, time.monotonic() + PATIENCE
        try:
            while not (at_once or self.store.check(["reported"]) or time.monotonic() > until):
                time.sleep(0.05)
            first = self.claim(text)
        except dist.DistError:  # the process that keeps the store has ended
            first = True
        named = first and not at_once
        failure.report(f"error{f' on rank {self.world.rank}' if named else ''}: {text}", printed=first)
        with suppress(dist.DistError):
            self.store.set("reported", str(self.world.rank))

    def claim(self, text: str) -> bool:
        """Mark an error as printed, ignoring numbers. Returns whether no rank has printed it before."""
        same = hashlib.sha256(re.sub(r"\d+", "0", text).encode()).hexdigest()
        return self.store.add(f"printed/{same}", 1) == 1


@contextmanager
def met(world: World, timeout: timedelta) -> Iterator[Rendezvous]:
    """Connect all ranks of this launch. Raises ValueError if a rank does not join within `timeout`."""
    if world.processes == 1:
        yield Rendezvous(world, dist.HashStore())
        return
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        values = f"MASTER_ADDR={address}, MASTER_PORT={port}"
        raise ValueError(f"WORLD_SIZE={world.processes}, but {values}: start with torchrun, which sets both")

    def connected(serves: bool = False) -> dist.Store:
        return dist.TCPStore(address, int(port), is_master=serves, timeout=timeout, wait_for_workers=False)

    try:
        store = connected(world.leads and not shared)
        name = attempt(store, world, timeout) if shared else "run"
    except dist.DistError:
        raise ValueError(f"rank 0 did not join the run within {timeout}") from None
    yield Rendezvous(world, dist.PrefixStore(name, store), lambda: dist.PrefixStore(name, connected()))


def agreed(ranks: Rendezvous, make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Call `make` on this rank and return its result, if its facts are the same on all ranks. Rank 0 compares them.

    Raises ValueError with the same text on all ranks: the facts that differ, with their values and ranks, or the error
    of `make` on any rank.
    """
    if ranks.world.processes == 1:
        return make()
    error: Exception | None = None
    report: dict[str, Any]
    try:
        made = make()
        report = {"facts": {key: _text(value) for key, value in facts(made).items() if key not in MAY_DIFFER}}
    except Exception as mistake:
        error, report = mistake, {"error": str(mistake)}
    difference = compared(ranks, report)
    if error is not None and not isinstance(error, ValueError | OSError | OmegaConfBaseException):
        raise error
    if difference:
        raise ValueError(difference) from error
    return made


def compared(ranks: Rendezvous, report: Mapping[str, Any]) -> str:
    """Compare the reports of all ranks, `{"facts": ...}` or `{"error": ...}`; return the difference or error, or ""."""
    rank = ranks.world.rank
    ranks.store.set(f"facts/{rank}", json.dumps(report, sort_keys=True))
    if ranks.world.leads:
        ranks.store.set("verdict", verdict([json.loads(each) for each in ranks.all("facts")]))
    try:
        return ranks.store.get("verdict").decode()
    except dist.DistError:
        raise ValueError("rank 0 did not report whether all ranks have the same configuration") from None


def refused(world: World, text: str) -> None:
    """Report this rank's error in its command line to the others, and print it once. Ranks without an error raise it
    from `agreed`.
    """
    with met(world, timedelta(minutes=DEFAULT_MINUTES)) as ranks:
        ranks.report(compared(ranks, {"error": text}))


def minutes(configured: float) -> timedelta:
    """Return the timeout of the ranks before their configuration is checked."""
    return timedelta(minutes=configured if 0 < configured < 1e6 else DEFAULT_MINUTES)


class Refusal:
    """Collects what all ranks write to stderr before a job starts, so that it is printed once.

    file: the collected text.
    """

    def __init__(self, world: World) -> None:
        self._world, self._real, self._inside = world, sys.stderr, False
        self.file = io.StringIO()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Redirect stderr to `file` within a `with` block."""
        with redirect_stderr(self.file):
            yield

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Restore stderr within a `with` block, while a job runs."""
        self._inside = True
        with redirect_stderr(self._real):
            yield
        self._inside = False

    def print_once(self, end: SystemExit, explain: Callable[[str], str]) -> None:
        """Print the errors after an exit: unchanged if a job had started or the exit is not an error, else once for all
        ranks. explain: makes the message from the collected text.
        """
        if self._inside or not end.code:
            print(self.file.getvalue(), file=self._real, end="")
        else:
            refused(self._world, explain(self.file.getvalue()))


def verdict(reports: list[dict[str, Any]]) -> str:
    """Return the difference between the reports of the ranks, in rank order, as `compared` does."""
    errors = _by_value(each.get("error") for each in reports)
    if len(errors) == 1 and None not in errors:
        return str(next(iter(errors)))
    if mistakes := {text: ranks for text, ranks in errors.items() if text is not None}:
        return "\n".join(f"{text} ({numbered(ranks)} only)" for text, ranks in mistakes.items())
    keys = sorted({key for each in reports for key in each["facts"]})
    values = {key: _by_value(each["facts"].get(key, "(absent)") for each in reports) for key in keys}
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
    """Return a hash of the package's Python files: nodes may have different checkouts."""
    package = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        total.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return total.hexdigest()[:8]


def numbered(ranks: Iterable[int]) -> str:
    """Return rank numbers as text: `rank 3`, `ranks 0-2 and 5`."""
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
