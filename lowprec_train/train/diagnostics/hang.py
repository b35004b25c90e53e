"""End a run with a hung rank within `parallel.timeout_minutes`; the error names the rank and where it hangs.

A collective does not report which rank is missing. So a thread of each rank inspects the stack of the main thread. If a
step takes long, the thread writes to the launch's store what the rank waits for. When a collective fails, the missing
ranks are those that wrote nothing or wait for something else. Each rank that can writes its Python stacks and torch's
flight recorder to `<run>/hang`.

The position of a rank is read from its stack, so steps have no extra cost.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from lowprec_train.train.diagnostics import flight
from lowprec_train.train.rendezvous import Rendezvous, numbered

PACKAGE = str(Path(__file__).parents[2])
PLACES: tuple[tuple[str, str, str], ...] = (
    ("train/stop_consensus.py", "", "the agreement to stop"),
    ("train/checkpoint.py", "", "the checkpoint"),
    ("train/launch.py", "first", "what rank 0 decides for all"),
    ("parallel/data.py", "total", "the all-reduce of the loss and the count of targets"),
    ("parallel/data.py", "anywhere", "the names of gradients that are not finite"),
    ("parallel/data.py", "end_backward", "the all-reduce of the gradients of vectors"),
    ("comm/axis.py", "all_reduce", "the all-reduce of gradients between replicas"),
    ("comm/axis.py", "reduce_scatter", "the reduce-scatter of gradients"),
    ("optim/norm.py", "", "the all-reduce of the norm of gradients"),
    ("optim/in_backward.py", "_complete", "the all-reduce of the norm of gradients"),
    ("optim/tensor_stats.py", "", "the all-reduce of the optimizer's statistics of tensors"),
    ("optim/param_state.py", "", "the all-gather of the optimizer's matrices"),
    ("parallel/quantized_all_gather.py", "", "the all-gather of weights"),
    ("parallel/in_place_all_gather.py", "", "the all-gather of weights"),
    ("parallel/weight_amax.py", "", "the all-reduce of the maxima of weights"),
    ("comm/fsdp.py", "_sqnr_db", "the all-reduce of the statistics of gradients"),
    ("comm/fsdp.py", "_move_head_room", "the all-reduce of the statistics of gradients"),
    ("optim/optimizer.py", "_start", "the all-reduce of the maxima of weights"),
    ("train/diagnostics/telemetry.py", "figures", "the all-reduce of telemetry"),
    ("comm/process_group.py", "", "the exchange of activations between tensor-parallel ranks"),
    ("fsdp/_fully_shard/_fsdp_param_group.py", "unshard", "the all-gather of weights"),
    ("fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard", "the all-gather of weights"),
    ("fsdp/_fully_shard/_fsdp_param_group.py", "post_backward", "the reduce-scatter of gradients"),
    ("train/logging/metrics.py", "", "the GPU"),
)
"""(file, function, what a rank in it waits for). The first entry that is on the stack counts; "" matches any function.
"""

BROKEN = re.compile(
    r"/gloo/|Timed out waiting \d+ms|Connection (closed|reset) by peer|NCCL (error|communicator|time)|nccl\w+Error"
)
PATIENCE = 4.0  # seconds for the other ranks to report their positions after a failure
Lines = list[tuple[str, str]]  # (file, function), innermost first
Reports = Mapping[int, Mapping[str, Any]]  # rank -> its "step", "what" it does and whether it "waits"


@dataclass(frozen=True)
class Place:
    """The process and host of a rank."""

    process: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class PeerLost(RuntimeError):
    """A collective failed because a rank hung or died; the message has the rank and where it was."""

    def __init__(self, message: str, absent: Sequence[Place] = (), *, reported: bool = False) -> None:
        """reported: whether another rank has printed this, or the error that caused it."""
        super().__init__(message)
        self._absent, self.reported = absent, reported

    def end_absent(self) -> None:
        """Kill the absent ranks of this rank's launcher: a stopped process would ignore torchrun's SIGTERM for half a
        minute.
        """
        for place in self._absent:
            if place.host == socket.gethostname() and _parent(place.process) == os.getppid():
                os.kill(place.process, signal.SIGKILL)


def _parent(process: int) -> int | None:
    """Return the process id of a process's parent; None if it is not known."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes."""
    return [] if error is None else [error, *chain(error.__cause__ or error.__context__)]


def of_peers(error: BaseException) -> bool:
    """Return whether an error is that of a collective that other ranks did not join."""
    network = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return any(
        isinstance(each, network) or (isinstance(each, RuntimeError) and BROKEN.search(str(each)))
        for each in chain(error)
    )


def doing(lines: Lines) -> tuple[str, bool]:
    """Return what a process with these lines on its stack does, and whether it waits for other ranks."""
    for file, function, what in PLACES:
        if any(path.endswith(file) and function in ("", name) for path, name in lines):
            return what, True
    for path, name in lines:
        if path.startswith(PACKAGE):
            collective = next((n for p, n in lines if p.endswith("distributed_c10d.py")), None)
            place = f"{Path(path).parent.name}/{Path(path).name}, {name}"
            return (f"{collective} of {place}" if collective else place), collective is not None
    return (f"{Path(lines[0][0]).name}, {lines[0][1]}" if lines else "nothing"), False


def of_frame(frame: FrameType | None) -> Lines:
    return _lines(traceback.extract_stack(frame)) if frame else []


def of_error(error: BaseException) -> Lines:
    """Return the stack lines of an error's causes, innermost first: where the collective failed."""
    return [line for each in reversed(chain(error)) for line in _lines(traceback.extract_tb(each.__traceback__))]


def _lines(stack: traceback.StackSummary) -> Lines:
    return [(line.filename, line.name) for line in reversed(stack)]


class Watch:
    """Watches what this rank does, and reports it to the other ranks if a step takes long.

    minutes: `parallel.timeout_minutes`. directory: for stacks and flight records; created when there are some. on_gpu:
    whether the device runs collectives, for which the host does not wait.
    """

    def __init__(self, ranks: Rendezvous, minutes: float, directory: Path, *, on_gpu: bool) -> None:
        self._ranks, self._rank, self._directory, self._on_gpu = ranks, ranks.world.rank, directory, on_gpu
        self._minutes, self._seconds = minutes, 60 * minutes
        self._patience = min(self._seconds / 4, 15.0)
        self._main, self._last_report = threading.main_thread().ident, ""
        self._step, self._since = 0, time.monotonic()
        self._recorded = self._explaining = False

    def begin_step(self, step: int) -> None:
        """Call before every step, counted from 1."""
        self._step, self._since = step, time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch from a background thread; turn the failure of a collective into PeerLost, which names the rank."""
        ended = threading.Event()
        if self._ranks.world.processes > 1:
            place = Place(os.getpid(), socket.gethostname())
            self._ranks.store.set(f"place/{self._rank}", json.dumps(asdict(place)))
            threading.Thread(target=self._look, args=(ended,), daemon=True, name="watch").start()
        try:
            yield
        except Exception as error:
            if self._ranks.world.processes > 1 and of_peers(error):
                raise self.explained(error) from error
            with suppress(dist.DistError):
                self._ranks.store.set(f"failed/{self._rank}", str(error) or type(error).__name__)
            raise
        finally:
            ended.set()

    def explained(self, error: BaseException) -> PeerLost:
        """Return an error with the missing ranks and what the others waited for. Reads the reports of all ranks, which
        takes a few seconds.
        """
        what, _ = doing(of_error(error))
        timed_out = "imed out" in str(error) or "timeout" in str(error).lower()
        cause = (str(error).strip().splitlines() or ["no message"])[-1][:200]
        how = f"waited {self._minutes:g} minutes (parallel.timeout_minutes)" if timed_out else f"failed: {cause}"
        return self._explained(what, how)

    def _explained(self, what: str, how: str) -> PeerLost:
        answer: list[PeerLost] = []
        self._explaining = True
        explaining = threading.Thread(target=self._agree_on_message, args=(what, how, answer), daemon=True)
        explaining.start()
        self._record()
        explaining.join(2 * PATIENCE + 1)
        silent = "the store of the launch, which torchrun or rank 0 keeps, does not answer"
        return answer[0] if answer else PeerLost(self._with_records(f"{at(self._step)}: {what}: {how}, and {silent}"))

    def _agree_on_message(self, what: str, how: str, answer: list[PeerLost]) -> None:
        """Report what this rank waits for. The first rank that calls this makes the message from all reports."""
        with suppress(dist.DistError):
            store = self._store
            self._report(what, waits=True)
            store.set("hung", "1")
            if store.add("asked", 1) > 1:
                store.wait(["answer"], timedelta(seconds=2 * PATIENCE))
                answer.append(PeerLost(store.get("answer").decode(), reported=True))
                return
            places = self._places()
            reports = self._gathered(places)
            failed = {rank: store.get(f"failed/{rank}").decode() for rank in places if store.check([f"failed/{rank}"])}
            text = self._with_records(verdict(reports, self._step, places, how, failed))
            store.set("answer", text)
            news = [self._ranks.claim(own) for own in failed.values()]
            absent = [places[rank] for rank in missing(reports, self._step, places) if rank not in failed]
            answer.append(PeerLost(text, absent, reported=bool(failed) and not absent and not any(news)))

    def _with_records(self, text: str) -> str:
        return f"{text}\nwhat each rank was doing: {self._directory}"

    def _gathered(self, places: Mapping[int, Place]) -> dict[int, dict[str, Any]]:
        """Return the ranks' reports, after all wait for this step's collectives or a few seconds have passed."""
        until, store = time.monotonic() + PATIENCE, self._store
        while True:
            keys = {rank: f"report/{rank}" for rank in places if store.check([f"report/{rank}"])}
            reports = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
            if time.monotonic() > until or not missing(reports, self._step, places):
                return reports
            time.sleep(0.25)

    def _places(self) -> dict[int, Place]:
        ranks = range(self._ranks.world.processes)
        return {rank: Place(**json.loads(self._store.get(f"place/{rank}"))) for rank in ranks}

    def _look(self, ended: threading.Event) -> None:
        with suppress(dist.DistError):  # the launcher, and the store with it, has ended
            while not ended.wait(min(1.0, self._patience / 2)):
                quiet = time.monotonic() - self._since
                if quiet < self._patience or self._explaining:
                    continue
                what, waits = doing(of_frame(sys._current_frames().get(self._main or 0)))
                self._report(what, waits=waits)
                if self._store.check(["hung"]):
                    self._record()
                if self._on_gpu and quiet > 0.9 * self._seconds and self._report_gpu_timeout():
                    return

    def _report_gpu_timeout(self) -> bool:
        """Report a device collective that is about to time out: NCCL's watchdog then ends the process at once."""
        oldest = flight.unfinished()
        if oldest is None or oldest.seconds < 0.9 * self._seconds:
            return False
        what = f"{doing(oldest.lines)[0]} ({oldest.name})"
        how = f"waited {oldest.seconds / 60:.2g} minutes (parallel.timeout_minutes={self._minutes:g})"
        lost = self._explained(what, how)
        if not lost.reported:
            self._ranks.report(str(lost), alone=True)
        lost.end_absent()
        return True

    def _report(self, what: str, *, waits: bool) -> None:
        report = json.dumps({"step": self._step, "what": what, "waits": waits})
        if report != self._last_report:
            self._store.set(f"report/{self._rank}", report)
            self._last_report = report

    @cached_property
    def _store(self) -> dist.Store:
        """A separate connection to the store, opened when it is first needed."""
        return self._ranks.connect()

    def _record(self) -> None:
        """Write all stacks to `rank-N.txt` and the flight recorder to `rank_N`, as torch's tool expects."""
        if self._recorded:
            return
        self._recorded = True
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"rank-{self._rank}.txt").open("w") as file:
            file.write(f"step {self._step}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if content := flight.recording():
            (self._directory / f"rank_{self._rank}").write_bytes(content)


def missing(reports: Reports, step: int, places: Mapping[int, Place]) -> list[int]:
    """Return the ranks that do not wait in a collective of this step, according to their reports."""
    waiting = [rank for rank, each in reports.items() if each["step"] == step and each["waits"]]
    return [rank for rank in places if rank not in waiting]


def at(step: int) -> str:
    """Return the time of an event as text: a step, counted from 1, or before the first."""
    return f"step {step}" if step else "before the first step"


def verdict(
    reports: Reports, step: int, places: Mapping[int, Place], how: str, failed: Mapping[int, str] | None = None
) -> str:
    """Return the message about a failed collective.

    reports: of the ranks that reported. step: of this rank. how: what happened to the ranks that waited. failed: errors
    of ranks that failed otherwise.
    """
    absent = missing(reports, step, places)
    groups: dict[str, list[int]] = {}
    for rank in (rank for rank in places if rank not in absent):
        groups.setdefault(reports[rank]["what"], []).append(rank)
    waiting = "; ".join(f"{numbered(ranks)} in {what}" for what, ranks in sorted(groups.items(), key=lambda g: g[1]))
    why = {rank: _of_absent(reports.get(rank), step, (failed or {}).get(rank)) for rank in absent[:3]}
    lines = [f"{at(step)}: {waiting}: {how}"]
    lines += [f"rank {rank} did not arrive ({places[rank]}): it {reason}" for rank, reason in why.items()]
    lines += [f"and {len(absent) - 3} more: {numbered(absent[3:])}"] if len(absent) > 3 else []
    if not absent:
        lines.append("all ranks wait in a collective: if it is not the same one, the program differs between ranks")
    return "\n".join(lines)


def _of_absent(report: Mapping[str, Any] | None, step: int, failed: str | None) -> str:
    if failed is not None:
        return f"failed: {failed}"
    if report is None or report["step"] != step:
        return "is stopped, dead or cut off"
    return f"is in {report['what']}"
