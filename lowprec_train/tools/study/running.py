"""Trains the runs of a study on this machine, one run at a time on each worker, in the order of the plan.

Each run is a process of `tools.study.job`, which resumes from its own checkpoint. All state is in files, so the same
command continues the study, also on a machine to which the folder was copied. When the time limit is reached or a
signal arrives, the active runs receive SIGTERM or that signal, save after their step and end. If this process is
killed, its runs are killed too and later resume from their last checkpoints. If a run fails, the others continue, and
the command names the failed run at the end.
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
SHOWN = 6  # last lines of the log of a failed run


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Trains one run at a time. values: environment variables; defaults: those that are set only if they are unset.
    shares: whether other workers use its device.
    """

    name: str
    shares: bool
    values: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def gpu_workers(gpus: Sequence[str], per_gpu: int) -> list[Worker]:
    """Return `per_gpu` workers for each GPU. Every GPU gets a run before any gets a second one; these are dealt in the
    opposite order, so that two arms of different cost that alternate do not fill a GPU each.
    """
    return [
        Worker(
            name=f"GPU {gpu}" + f".{turn}" * (per_gpu > 1),
            shares=per_gpu > 1,
            values={"CUDA_VISIBLE_DEVICES": gpu},
        )
        for turn in range(per_gpu)
        for gpu in (gpus if turn % 2 == 0 else reversed(gpus))
    ]


def cpu_workers(count: int) -> list[Worker]:
    """Return `count` workers that share the cores of this machine's CPU."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    return [
        Worker(name=f"CPU {i}", shares=count > 1, defaults=threads, overrides=("device=cpu",)) for i in range(count)
    ]


@dataclass
class Active:
    """A run that is being trained. fresh: the run had no directory before. begun: start time, seconds since the epoch.
    stepped: seconds until its first step. stopped: whether a signal was sent.
    """

    run: StudyRun
    worker: Worker
    process: subprocess.Popen[Any]
    fresh: bool
    begun: float = field(default_factory=time.time)
    stepped: float | None = None
    stopped: bool = False

    def stop(self, number: int) -> None:
        """Send a signal, unless one was sent before."""
        if not self.stopped:
            self.stopped = True
            self.process.send_signal(number)

    def note_first_step(self, metrics: Path) -> None:
        """Record when the first step of this launch was logged."""
        if self.stepped is None and metrics.exists() and metrics.stat().st_mtime > self.begun:
            self.stepped = time.time() - self.begun


class Runner:
    """Trains the runs of a plan that are not finished.

    out: folder of the study. minutes: time limit, or None. say: prints a line. keep_checkpoints: keep those of finished
    runs. whole: all runs of the study, if `planned` is a part of it; checkpoints that these fork from are kept.
    on_finished: is called after each run that finished or diverged.
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
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self.planned, self.out, self.workers, self.say = planned, out, workers, say
        self.on_finished = on_finished
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.keep_checkpoints, self.whole = keep_checkpoints, whole or planned
        self.failed: dict[str, str] = {}
        self._unfit: set[str] = set()  # arms with a run that failed before its first step
        self._active: list[Active] = []
        self._stopping = 0
        self._startup = 0.0
        self._states: dict[str, State] = {}

    def run(self) -> dict[str, str]:
        """Train until all runs are finished or the time limit is reached; return the output of each failed run.

        Raises ValueError if a trained run has another configuration than the plan.
        """
        self._states = states(self.planned, self.out)
        check_same([run for run in self.planned if self._states[run.name].ended], self.out)
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        with signals.blocked(), self._signals_forwarded():
            try:
                while self._begin() or self._active:
                    time.sleep(POLL)
                    self._end_in_time()
                    self._reap()
            finally:
                self._kill()
        return self.failed

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """Forward signals to all runs; a second interrupt kills them."""

        def forward(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT == self._stopping:
                raise KeyboardInterrupt
            self._stop(number)

        with signals.handled(forward):
            yield

    def _stop(self, number: int) -> None:
        if not self._stopping or number == signal.SIGINT:
            self._stopping = number
        for each in self._active:
            each.stop(number)

    def _end_in_time(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline and not self._stopping:
            self.say(f"{_clock()} time limit reached: {len(self._active)} runs save and end")
            self._stop(signal.SIGTERM)

    def _begin(self) -> bool:
        """Start a run on a free worker; return whether one was started. A run is started only if more time is left than
        an earlier run needed until its first step.
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
            if self._stopping:  # a signal arrived while the run was started
                begun.stop(self._stopping)
        except (ValueError, OSError, CheckpointError) as error:
            self.failed[run.name] = str(error)
            self.say(f"{_clock()} {free[0].name}: {run.name} failed")
        return True

    def _ready(self) -> Iterator[StudyRun]:
        """Yield the runs that can start now, in the order of the plan."""
        active = {each.run.name for each in self._active}
        for run in self.planned:
            if self._states[run.name].finished or run.name in (*active, *self.failed) or run.arm in self._unfit:
                continue
            if run.trunk is None or self._states[run.name] is not State.new or self._forkable(run):
                yield run

    def _forkable(self, run: StudyRun) -> bool:
        """Return whether the trunk of a run is finished, or has passed the step that the run forks from."""
        assert run.trunk is not None and run.fork is not None
        if self._states[run.trunk].finished:
            return True
        try:
            return run.trunk not in self.failed and forking.saved(self.out / run.trunk, run.fork.step)
        except ValueError:  # spoilt metrics: an error of the fork, once the trunk has ended
            return False

    def _started(self, run: StudyRun, worker: Worker) -> Active:
        if run.trunk is not None and run.fork is not None:
            config = plain(configuration(run, self.out))
            forking.fork(self.out / run.trunk, self.out / run.name, run.fork.step, config)
        number = self.planned.index(run) + 1
        self.say(f"{_clock()} {worker.name}: {run.name} ({number} of {len(self.planned)})")
        arguments = [*run.command(self.out), *worker.overrides]
        if run.trunk is None and lost_checkpoints(self.out / run.name):
            self.say(f"{run.name}: its checkpoints are missing; its directory is moved aside and the run starts again")
            arguments.append("resume=never")
        defaults = {"TORCHINDUCTOR_CACHE_DIR": str((self.out / "inductor").absolute()), **worker.defaults}
        if worker.shares:
            note_shared(self.out, run.name)
        process = processes.background(JOB, arguments, self._log(run), values=worker.values, defaults=defaults)
        return Active(run, worker, process, fresh=self._states[run.name] is State.new)

    def _reap(self) -> None:
        for each in list(self._active):
            each.note_first_step(self.out / each.run.name / "metrics.jsonl")
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
            self.on_finished()
        elif status and not (self._stopping and status < 0):
            printed = self._log(each.run).read_text(errors="replace").splitlines()[-SHOWN:]
            self.failed[name] = "\n".join(printed) or f"status {status}"
            self._unfit |= {each.run.arm} if each.fresh and each.stepped is None else set()
        outcome = "failed" if name in self.failed else found.value
        self.say(f"{_clock()} {each.worker.name}: {name} {outcome} after {time.time() - each.begun:.0f} s")

    def _prune(self) -> None:
        """Remove the checkpoints of finished runs from which no other run will fork."""
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
    """Whether a run has saved checkpoints and its directory has none, as after a copy without them."""
    checkpoints = run / "checkpoints"
    saved = (run / "PREEMPTED").exists() or not checkpoints.exists()
    return (run / "config.yaml").exists() and saved and not folder.steps(checkpoints)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
