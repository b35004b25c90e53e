"""Resume: from which checkpoint a launch continues, to which step, and what happens to later results.

    resume=auto      the newest checkpoint; a run that is done stays done
    resume=step-N    that checkpoint
    resume=extend    more steps: the newest checkpoint at which both schedules have the same learning rate (of a WSD run
                     one before its decay), else the newest, and the learning rate changes there

Results after that checkpoint are kept in a run directory of their own beside the run. A launch that goes back records
it in run.json, so that the same command, given again by Slurm or torchrun after a crash, continues.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowprec_train.config import Resume, RunConfig, parse_resume
from lowprec_train.optim.schedule import Schedule
from lowprec_train.precision.schedule import first_step
from lowprec_train.train import checkpoint_folder as folder
from lowprec_train.train.checkpoint_folder import aside
from lowprec_train.train.construct import construct
from lowprec_train.train.digests import CheckpointError
from lowprec_train.train.identity import family, longer, runs
from lowprec_train.train.logging.sinks import read_lines
from lowprec_train.train.rundir import ENDED, RESTORE, RunDirectory

log = logging.getLogger(__name__)

ALIKE = 10  # updates before a checkpoint at which two schedules must agree: two curves that cross do not for long
LINES = ("metrics.jsonl", "telemetry.jsonl")


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a launch is to do."""

    step: int | None = None  # of the checkpoint to load; None: the newest, or none in a new run
    leaves: bool = False  # whether it leaves the run's newest state
    done: bool = False  # there is nothing to do
    told: tuple[str, ...] = ()  # lines that say so
    facts: Mapping[str, Any] = field(default_factory=dict)  # for run.json
    logged: int = 0  # the last step of which metrics.jsonl has a line


def plan(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    """What a launch of `run` does with the run in a directory; reads it and changes nothing. plain: `run`, resolved.

    Raises ValueError where a checkpoint was asked for that is not there, or leaves no step to take; where the run has
    trained, and none of its checkpoints is found; and for a file that would be gone on with and cannot be read.
    CheckpointError: the checkpoints cannot be read.
    """
    if not directory.resumed:
        return _new(directory, run, plain)
    way = _onward(directory, run, plain)
    if way.done:
        return way
    logged, _ = (_last_step(directory.path / name) for name in LINES)
    return replace(way, logged=logged)


def _onward(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    (resume, asked), about = parse_resume(run.resume), directory.path / "run.json"
    if not directory.saved.get("corpus_hash"):
        wrong = "has no corpus_hash" if directory.saved else "is missing"
        raise ValueError(f"{about} {wrong}: it says what text the run began with; {RESTORE}")
    there, stopped = folder.steps(directory.path / "checkpoints"), _stopped(directory)
    ended, history = directory.read("DONE"), directory.saved.get("history", [])
    if longer(directory.config, plain):
        step = _common(directory.config, run, there) if asked is None else _asked(directory, asked, there)
        return _extended(directory, run, step, went_back=asked)
    facts = {"history": history, "went_back_to": asked}
    again = asked is not None and not directory.done and directory.saved.get("went_back_to") == asked
    if asked is not None and not again and _asked(directory, asked, there) < run.steps:
        told = f"run {directory.path} goes back to step {asked}"
        return Continuation(step=asked, leaves=True, told=(told,), facts=facts | {"history": [*history, told]})
    if directory.done:
        extend = "" if resume is Resume.extend else "with resume=extend "
        more = f"a larger steps=... than {run.steps} {extend}goes on; resume=never, or another name=..., trains again"
        return Continuation(done=True, told=(f"run {directory.path} is done: {ended}", more))
    told = f"an earlier launch went back to step {asked}: the run goes on from its newest checkpoint"
    began = not there and _has_begun_again(directory, stopped)
    return Continuation(leaves=began, told=(told,) if again else (), facts=facts)


def _asked(directory: RunDirectory, step: int, there: Sequence[int]) -> int:
    if step not in there:
        checkpoints = directory.path / "checkpoints"
        raise ValueError(f"resume=step-{step}: {checkpoints} has no step-{step}; {folder.listed(checkpoints)}")
    return step


def _stopped(directory: RunDirectory) -> int:
    """The step at which a signal ended the last launch; 0 if none did."""
    step = directory.read("PREEMPTED").get("step", 0)
    if not isinstance(step, int):
        raise ValueError(f"{directory.path / 'PREEMPTED'} has step {step!r}, which is no number; {ENDED}")
    return step


def _new(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    name, root = directory.path.name, directory.path.parent
    if run.resume not in (Resume.auto.value, Resume.never.value):
        raise ValueError(f"resume={run.resume}: there is no run {name!r} in {root}")
    shorter = [
        each
        for each, facts in runs(root).items()
        if run.name is None and facts.get("family") == family(plain) and facts.get("steps", run.steps) < run.steps
    ]
    hint = f"this run in a shorter form is {', '.join(shorter)} in {root}; resume=extend goes on with it instead"
    return Continuation(told=(hint,) if shorter else ())


def _extended(directory: RunDirectory, run: RunConfig, step: int, *, went_back: int | None) -> Continuation:
    before, history = directory.config["steps"], directory.saved.get("history", [])
    if not step < run.steps:
        raise ValueError(f"resume={run.resume} steps={run.steps}: step-{step} leaves no step to take")
    if went_back is None and run.steps <= before:
        raise ValueError(f"resume=extend steps={run.steps}: the run has {before} steps already")
    lines = [f"run {directory.path}, of {before} steps, goes on after step {step} towards step {run.steps}"]
    lines += [f"learning rate {_rates(directory.config, run, step)}", *_moved_phases(run, before)]
    facts = {"history": [*history, "; ".join(lines)], "went_back_to": went_back}
    return Continuation(step=step, leaves=True, told=tuple(lines), facts=facts)


def _common(saved: Mapping[str, Any], run: RunConfig, there: Sequence[int]) -> int:
    """The newest checkpoint at which the learning rates before and after are those of both lengths, else the newest."""
    old, new, reached = construct(saved["optim"]["schedule"]), construct(run.optim.schedule), _phases_reached(saved)
    common = [step for step in there if 0 < step <= reached and step < run.steps and _agree(old, new, step)]
    if not there:
        raise ValueError("resume=extend: the run has no checkpoint")
    return max(common, default=there[-1])


def _agree(old: Schedule, new: Schedule, step: int) -> bool:
    return all(math.isclose(old(i), new(i), rel_tol=1e-9) for i in range(max(0, step - ALIKE), step))


def _phases_reached(saved: Mapping[str, Any]) -> float:
    """The step at which the run as it was changes its precision for the first time."""
    phases = saved.get("precision", {}).get("schedule", {}).values()
    return min((first_step(phase["at"], saved["steps"]) for phase in phases), default=math.inf)


def _moved_phases(run: RunConfig, before: int) -> list[str]:
    """A line about the phases of precision, which begin later now, or earlier; none without phases."""
    moved = [
        f"{name} from step {first_step(phase.at, run.steps)} on, not {first_step(phase.at, before)}"
        for name, phase in run.precision.schedule.items()
    ]
    return [f"precision: {', '.join(moved)}"] if moved else []


def _rates(saved: Mapping[str, Any], run: RunConfig, step: int) -> str:
    """Of the last update that was done, the next, one half-way and the last."""
    old, new = construct(saved["optim"]["schedule"]), construct(run.optim.schedule)
    half = (step + run.steps) // 2
    then = [f"{new(update - 1):.3g} at step {update}" for update in (step + 1, half, run.steps)]
    return f"{old(step - 1):.3g} at step {step}, then {', '.join(dict.fromkeys(then))}"


def _has_begun_again(directory: RunDirectory, stopped: int) -> bool:
    """Whether a run without a checkpoint, which begins again at step 0, has lines that are to be kept.

    stopped: the step at which a signal ended it. The second save waits for the first, so what was logged past the
    second one's step was logged after a checkpoint was written: ValueError there, and wherever the run must have saved.
    """
    run, checkpoints = directory.path, directory.path / "checkpoints"
    interval, waits = directory.config.get("checkpoint_interval", 1), directory.config.get("checkpoint_async", True)
    logged = _last_step(run / "metrics.jsonl")
    gone = (checkpoints / folder.POINTER).exists() or not checkpoints.exists()
    if gone or stopped or logged > interval * (1 + waits):
        raise ValueError(
            f"run {run} has trained {max(logged, stopped)} steps, and there is no checkpoint in {checkpoints}.\n"
            f"Restore them, or resume=never moves the run aside to {aside(run).name} and starts afresh."
        )
    return logged >= interval


def _last_step(metrics: Path) -> int:
    return max((line["step"] for line in read_lines(metrics)), default=0) if metrics.exists() else 0


def take(directory: RunDirectory, way: Continuation, step: int, *, read: int) -> None:
    """Go on from `step`, whose checkpoint is loaded: leave what comes after where that is the way, and say so where
    lines from before it are lost, as a crash of the machine may do. read: the step that the loaded state tells.

    Raises CheckpointError where that is another one: files were exchanged, and their bytes not compared.
    """
    if read != step:
        checkpoints = directory.path / "checkpoints"
        raise CheckpointError(f"{checkpoints}/step-{step} holds the state of step {read}; {folder.listed(checkpoints)}")
    if step - way.logged >= directory.config.get("log_interval", 1):
        lost = f"{way.logged + 1} to {step}" if way.logged + 1 < step else f"{step}"
        log.warning("warning: %s has no line of step %s: they are lost", directory.path / LINES[0], lost)
    if way.leaves:
        leave(directory, step)


def leave(directory: RunDirectory, step: int) -> None:
    """Move what a run has after `step` into a run directory of its own beside it, and let `latest` name `step`. At step
    0, for want of a checkpoint, keep a copy of what was logged.

    Killed on the way, what was moved is there and the rest is here: the same command goes on with it.
    """
    run, checkpoints = directory.path, directory.path / "checkpoints"
    if not step:
        kept = aside(run / LINES[0])
        shutil.copy2(run / LINES[0], kept)
        log.warning("warning: no checkpoint was written; the run begins again, and what it logged is kept in %s", kept)
        return
    later = [each for each in folder.steps(checkpoints) if each > step]
    if later or (directory.done and _last_step(run / LINES[0]) > step):
        log.info("what it had after step %d is kept in %s", step, _moved(run, later))
    folder.point_to(checkpoints, step)
    (run / "DONE").unlink(missing_ok=True)


def _moved(run: Path, later: Sequence[int]) -> Path:
    """A run directory with copies of a run's files and with those of its checkpoints."""
    kept = aside(run)
    (kept / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "recipe.json", *LINES, "DONE", "PREEMPTED", "DIVERGED", "config.yaml"):
        if (run / name).exists():
            shutil.copy2(run / name, kept / name)
    for each in later[::-1]:
        folder.path_of(run / "checkpoints", each).rename(folder.path_of(kept / "checkpoints", each))
    if later:
        folder.point_to(kept / "checkpoints", later[-1])
    return kept
