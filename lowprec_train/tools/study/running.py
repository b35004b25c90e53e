"""Train the runs of a study on this machine: some workers, one run on each at a time, in the order of the plan.

Every run is a process of `tools.study.job`, which resumes from its own checkpoint; this one holds no state but files.
When the time is over, or a signal comes, the running ones get SIGTERM or that signal, save after their step and end;
the same command, here or where the folder was copied to, goes on. Killed outright, it takes its runs with it, and each
goes on from its last checkpoint. A run that fails is named in the end; the other arms go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lowprec_train.tools.study import forking
from lowprec_train.tools.study.plan import StudyRun, check_same, configuration, plain
from lowprec_train.tools.study.progress import State, note_shared, state, states
from lowprec_train.train import checkpoint_folder as folder
from lowprec_train.train import processes, signals
from lowprec_train.train.digests import CheckpointError

JOB = "lowprec_train.tools.study.job"
POLL = 0.1  # seconds
SHOWN = 6  # last lines of a run that has failed


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A place for one run. values: of its environment; defaults: where the environment has none. shares: whether
    other places are on its device.
    """

    name: str
    shares: bool
    values: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def gpu_workers(gpus: Sequence[str], per_gpu: int) -> list[Worker]:
    """`per_gpu` places on each GPU, the first ones of all GPUs first."""
    return [
        Worker(
            name=f"GPU {gpu}" + f".{turn}" * (per_gpu > 1),
            shares=per_gpu > 1,
            values={"CUDA_VISIBLE_DEVICES": gpu},
        )
        for turn in range(per_gpu)
        for gpu in gpus
    ]


def cpu_workers(count: int) -> list[Worker]:
    """Places on this machine's CPU, which share its cores."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    return [
        Worker(name=f"CPU {i}", shares=count > 1, defaults=threads, overrides=("device=cpu",)) for i in range(count)
    ]


@dataclass
class Active:
    """A run that is being trained. fresh: nothing of it was there. begun: seconds of the clock of this machine.
    stepped: until its first step. told: to stop.
    """

    run: StudyRun
    worker: Worker
    process: subprocess.Popen[Any]
    fresh: bool
    begun: float = field(default_factory=time.time)
    stepped: float | None = None
    told: bool = False

    def stop(self, number: int) -> None:
        """Send a signal, the first one only."""
        if not self.told:
            self.told = True
            self.process.send_signal(number)

    def look(self, metrics: Path) -> None:
        """Note when the first step of this launch was logged."""
        if self.stepped is None and metrics.exists() and metrics.stat().st_mtime > self.begun:
            self.stepped = time.time() - self.begun


class Runner:
    """Trains what is left of a plan.

    out: the folder of the study. minutes: after which running ones are asked to save; None: no end. say: tells people.
    keep_checkpoints: also of runs that are done. whole: all runs of the study, of which `planned` may be a part; a
    checkpoint from which one of them is to fork is kept.
    """

    def __init__(
        self,
        planned: Sequence[StudyRun],
        out: Path,
        workers: Sequence[Worker],
        *,
        minutes: float | None = None,
        keep_checkpoints: bool = True,
        whole: Sequence[StudyRun] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self.planned, self.out, self.workers, self.say = planned, out, workers, say
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.keep_checkpoints, self.whole = keep_checkpoints, whole or planned
        self.failed: dict[str, str] = {}
        self._unfit: set[str] = set()  # arms of which a run has failed before its first step
        self._active: list[Active] = []
        self._stopping = 0
        self._startup = 0.0
        self._states: dict[str, State] = {}

    def run(self) -> dict[str, str]:
        """Until nothing is left to begin, or the time is over; the runs that failed, and what they said.

        ValueError where a run that is trained has another configuration than the plan.
        """
        self._states = states(self.planned, self.out)
        check_same([run for run in self.planned if self._states[run.name].ended], self.out)
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        with signals.blocked(), self._heeded():
            try:
                while self._begin() or self._active:
                    time.sleep(POLL)
                    self._end_in_time()
                    self._reap()
            finally:
                self._kill()
        return self.failed

    @contextmanager
    def _heeded(self) -> Iterator[None]:
        """Hand signals on to all runs; a second interrupt ends them at once."""

        def hand_on(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT == self._stopping:
                raise KeyboardInterrupt
            self._stop(number)

        with signals.handled(hand_on):
            yield

    def _stop(self, number: int) -> None:
        if not self._stopping or number == signal.SIGINT:
            self._stopping = number
        for each in self._active:
            each.stop(number)

    def _end_in_time(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline and not self._stopping:
            self.say(f"{_clock()} the time is over: {len(self._active)} runs save and end")
            self._stop(signal.SIGTERM)

    def _begin(self) -> bool:
        """Fill the free workers; whether a run has begun. None begins in less time than one has needed to its first
        step.
        """
        free = [worker for worker in self.workers if worker not in [each.worker for each in self._active]]
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if self._stopping or not free or (left is not None and left <= self._startup):
            return False
        run = next(self._ready(), None)
        if run is None:
            return False
        try:
            self._active.append(begun := self._started(run, free[0]))
            if self._stopping:  # since a signal came while it was made
                begun.stop(self._stopping)
        except (ValueError, OSError, CheckpointError) as error:
            self.failed[run.name] = str(error)
            self.say(f"{_clock()} {free[0].name}: {run.name} failed")
        return True

    def _ready(self) -> Iterator[StudyRun]:
        """Runs that may begin, in order."""
        active = {each.run.name for each in self._active}
        for run in self.planned:
            if self._states[run.name].finished or run.name in (*active, *self.failed) or run.arm in self._unfit:
                continue
            trunk = None if run.trunk is None or self._states[run.name] is not State.new else self._states[run.trunk]
            if trunk is None or trunk.finished:
                yield run

    def _started(self, run: StudyRun, worker: Worker) -> Active:
        if run.trunk is not None and run.fork is not None:
            config = plain(configuration(run, self.out))
            forking.fork(self.out / run.trunk, self.out / run.name, run.fork.step, config)
        number = self.planned.index(run) + 1
        self.say(f"{_clock()} {worker.name}: {run.name} ({number} of {len(self.planned)})")
        arguments = [*run.command(self.out), *worker.overrides]
        if run.trunk is None and lost_checkpoints(self.out / run.name):
            self.say(f"{run.name}: its checkpoints are not here; what it has is moved aside, and it begins again")
            arguments.append("resume=never")
        defaults = {"TORCHINDUCTOR_CACHE_DIR": str((self.out / "inductor").absolute()), **worker.defaults}
        if worker.shares:
            note_shared(self.out, run.name)
        process = processes.background(JOB, arguments, self._log(run), values=worker.values, defaults=defaults)
        return Active(run, worker, process, fresh=self._states[run.name] is State.new)

    def _reap(self) -> None:
        for each in list(self._active):
            each.look(self.out / each.run.name / "metrics.jsonl")
            status = each.process.poll()
            if status is not None:
                self._active.remove(each)
                self._startup = max(self._startup, each.stepped or 0.0)
                self._ended(each, status)

    def _ended(self, each: Active, status: int) -> None:
        name = each.run.name
        try:
            self._states[name] = found = state(self.out / name)
        except ValueError as error:
            self.failed[name] = str(error)
            self.say(f"{_clock()} {each.worker.name}: {name} failed")
            return
        if found.finished:
            self._prune()
        elif status and not (self._stopping and status < 0):
            printed = self._log(each.run).read_text(errors="replace").splitlines()[-SHOWN:]
            self.failed[name] = "\n".join(printed) or f"status {status}"
            self._unfit |= {each.run.arm} if each.fresh and each.stepped is None else set()
        outcome = "failed" if name in self.failed else found.value
        self.say(f"{_clock()} {each.worker.name}: {name} {outcome} after {time.time() - each.begun:.0f} s")

    def _prune(self) -> None:
        """Remove the checkpoints of runs that are finished and that nothing is to fork from."""
        if self.keep_checkpoints:
            return
        needed = {run.trunk for run in self.whole if state(self.out / run.name) is State.new}
        for run in self.planned:
            checkpoints = self.out / run.name / "checkpoints"
            if self._states[run.name].finished and run.name not in needed and checkpoints.exists():
                shutil.rmtree(checkpoints)

    def _kill(self) -> None:
        for each in self._active:
            if each.process.poll() is None:
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()

    def _log(self, run: StudyRun) -> Path:
        return self.out / "logs" / f"{run.name}.log"


def lost_checkpoints(run: Path) -> bool:
    """Whether a run was saved, and copied here without what was saved."""
    checkpoints = run / "checkpoints"
    saved = (run / "PREEMPTED").exists() or not checkpoints.exists()
    return (run / "config.yaml").exists() and saved and not folder.steps(checkpoints)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
