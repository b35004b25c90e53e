"""Resuming: the checkpoint from which a launch continues, its last step, and what happens to later results.

    resume=auto      the newest checkpoint; a finished run stays finished
    resume=step-N    that checkpoint
    resume=extend    more steps, from the newest checkpoint at which the old and the new schedule have the same learning
                     rate (for WSD one before the decay); without one, from the newest, where the learning rate changes

Results after that checkpoint are moved to a new run directory beside the run. A launch that goes back records this in
run.json, so that the same command continues when Slurm or torchrun repeats it after a crash.
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
from lowprec_train.train.rundir import ENDED, EVALUATION, RESTORE, RunDirectory

log = logging.getLogger(__name__)

ALIKE = 10  # updates before a checkpoint in which two schedules must agree; curves that only cross agree for fewer
LINES = ("metrics.jsonl", "telemetry.jsonl")


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a launch does."""

    step: int | None = None  # checkpoint to load; None: the newest, or none in a new run
    rewinds: bool = False  # move the results after `step` to another run directory
    done: bool = False  # the run is finished
    messages: tuple[str, ...] = ()  # log lines about this decision
    facts: Mapping[str, Any] = field(default_factory=dict)  # for run.json
    logged: int = 0  # last step in metrics.jsonl


def plan(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    """Decide how a launch of `run` continues the run in a directory. Reads it and changes nothing. plain: `run`,
    resolved.

    Raises ValueError if the requested checkpoint does not exist or no steps remain after it, if the run has trained but
    has no checkpoint, or if a file that is needed to continue cannot be read. Raises CheckpointError if the checkpoints
    cannot be read.
    """
    if not directory.resumed:
        return _new(directory, run, plain)
    decision = _decide(directory, run, plain)
    if decision.done:
        return decision
    logged, _ = (_last_step(directory.path / name) for name in LINES)
    return replace(decision, logged=logged)


def _decide(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    (resume, requested), about = parse_resume(run.resume), directory.path / "run.json"
    if not directory.saved.get("corpus_hash"):
        wrong = "has no corpus_hash" if directory.saved else "is missing"
        raise ValueError(f"{about} {wrong}, so the corpus of the run is unknown; {RESTORE}")
    there, stopped = folder.steps(directory.path / "checkpoints"), _stopped(directory)
    ended, history = directory.read("DONE"), directory.saved.get("history", [])
    if longer(directory.config, plain):
        step = _common(directory.config, run, there) if requested is None else _existing(directory, requested, there)
        return _extended(directory, run, step, went_back=requested)
    facts = {"history": history, "went_back_to": requested}
    again = requested is not None and not directory.done and directory.saved.get("went_back_to") == requested
    if requested is not None and not again and _existing(directory, requested, there) < run.steps:
        message = f"run {directory.path} goes back to step {requested}"
        facts["history"] = [*history, message]
        return Continuation(step=requested, rewinds=True, messages=(message,), facts=facts)
    if directory.done:
        extend = "" if resume is Resume.extend else " with resume=extend"
        more = f"to continue, set steps=... above {run.steps}{extend}; to train again, use resume=never or another name"
        return Continuation(done=True, messages=(f"run {directory.path} is done: {ended}", more))
    message = f"an earlier launch went back to step {requested}; the run continues from its newest checkpoint"
    restarts = not there and _has_begun_again(directory, stopped)
    return Continuation(rewinds=restarts, messages=(message,) if again else (), facts=facts)


def _existing(directory: RunDirectory, step: int, there: Sequence[int]) -> int:
    if step not in there:
        checkpoints = directory.path / "checkpoints"
        raise ValueError(f"resume=step-{step}: {checkpoints} has no step-{step}; {folder.listed(checkpoints)}")
    return step


def _stopped(directory: RunDirectory) -> int:
    """Return the step at which a signal ended the last launch; 0 if none did."""
    step = directory.read("PREEMPTED").get("step", 0)
    if not isinstance(step, int):
        raise ValueError(f"{directory.path / 'PREEMPTED'} has step {step!r}, which is not a number; {ENDED}")
    return step


def _new(directory: RunDirectory, run: RunConfig, plain: Mapping[str, Any]) -> Continuation:
    name, root = directory.path.name, directory.path.parent
    if run.resume not in (Resume.auto.value, Resume.never.value):
        raise ValueError(f"resume={run.resume}: there is no run {name!r} in {root}; resume=auto starts it")
    shorter = [
        each
        for each, facts in runs(root).items()
        if run.name is None and facts.get("family") == family(plain) and facts.get("steps", run.steps) < run.steps
    ]
    hint = f"{root} has shorter versions of this run: {', '.join(shorter)}; resume=extend continues one instead"
    return Continuation(messages=(hint,) if shorter else ())


def _extended(directory: RunDirectory, run: RunConfig, step: int, *, went_back: int | None) -> Continuation:
    before, history = directory.config["steps"], directory.saved.get("history", [])
    if not step < run.steps:
        raise ValueError(
            f"resume={run.resume}: no steps remain: the checkpoint is at step {step} and steps={run.steps}; "
            "set a larger steps=..."
        )
    if went_back is None and run.steps <= before:
        raise ValueError(f"resume=extend steps={run.steps}: the run already has {before} steps; set a larger steps=...")
    lines = [f"run {directory.path}, of {before} steps, continues after step {step} up to step {run.steps}"]
    lines += [f"learning rate {_rates(directory.config, run, step)}", *_moved_phases(run, before)]
    facts = {"history": [*history, "; ".join(lines)], "went_back_to": went_back}
    return Continuation(step=step, rewinds=True, messages=tuple(lines), facts=facts)


def _common(saved: Mapping[str, Any], run: RunConfig, there: Sequence[int]) -> int:
    """Return the newest checkpoint around which both schedules have the same learning rates, else the newest."""
    old, new, reached = construct(saved["optim"]["schedule"]), construct(run.optim.schedule), _phases_reached(saved)
    common = [step for step in there if 0 < step <= reached and step < run.steps and _agree(old, new, step)]
    if not there:
        raise ValueError("resume=extend: the run has no checkpoint")
    return max(common, default=there[-1])


def _agree(old: Schedule, new: Schedule, step: int) -> bool:
    return all(math.isclose(old(i), new(i), rel_tol=1e-9) for i in range(max(0, step - ALIKE), step))


def _phases_reached(saved: Mapping[str, Any]) -> float:
    """Return the first step at which the saved run changes its precision."""
    phases = saved.get("precision", {}).get("schedule", {}).values()
    return min((first_step(phase["at"], saved["steps"]) for phase in phases), default=math.inf)


def _moved_phases(run: RunConfig, before: int) -> list[str]:
    """Return a line with the new first steps of the precision phases; no line without phases."""
    moved = [
        f"{name} from step {first_step(phase.at, run.steps)} on, not {first_step(phase.at, before)}"
        for name, phase in run.precision.schedule.items()
    ]
    return [f"precision: {', '.join(moved)}"] if moved else []


def _rates(saved: Mapping[str, Any], run: RunConfig, step: int) -> str:
    """Return the learning rates of the last finished update, the next, one half-way and the last, as text."""
    old, new = construct(saved["optim"]["schedule"]), construct(run.optim.schedule)
    half = (step + run.steps) // 2
    then = [f"{new(update - 1):.3g} at step {update}" for update in (step + 1, half, run.steps)]
    return f"{old(step - 1):.3g} at step {step}, then {', '.join(dict.fromkeys(then))}"


def _has_begun_again(directory: RunDirectory, stopped: int) -> bool:
    """Return whether a run without a checkpoint, which restarts at step 0, has metrics that must be kept.

    stopped: the step at which a signal ended the run. A save waits for the previous save, so metrics beyond the step of
    the second save prove that a checkpoint was written. Raises ValueError then, and if the run must have saved.
    """
    run, checkpoints = directory.path, directory.path / "checkpoints"
    interval, waits = directory.config.get("checkpoint_interval", 1), directory.config.get("checkpoint_async", True)
    logged = _last_step(run / "metrics.jsonl")
    gone = (checkpoints / folder.POINTER).exists() or not checkpoints.exists()
    if gone or stopped or logged > interval * (1 + waits):
        raise ValueError(
            f"run {run} has trained {max(logged, stopped)} steps, but there is no checkpoint in {checkpoints}.\n"
            f"Restore the checkpoints, or use resume=never to move the run to {aside(run).name} and start again."
        )
    return logged >= interval


def _last_step(metrics: Path) -> int:
    return max((line["step"] for line in read_lines(metrics)), default=0) if metrics.exists() else 0


def resume_at(directory: RunDirectory, decision: Continuation, step: int, *, loaded: int) -> None:
    """Continue from `step`, whose checkpoint is loaded. Moves later results aside if the decision rewinds. Warns if
    metrics.jsonl lacks lines before `step`, as after a crash of the machine. loaded: the step in the loaded state.

    Raises CheckpointError if `loaded` differs: checkpoint files were swapped and their bytes were not compared.
    """
    if loaded != step:
        checkpoints = directory.path / "checkpoints"
        there = folder.listed(checkpoints)
        raise CheckpointError(f"{checkpoints}/step-{step} holds the state of step {loaded}; {there}")
    if step - decision.logged >= directory.config.get("log_interval", 1):
        lost = f"{decision.logged + 1} to {step}" if decision.logged + 1 < step else f"{step}"
        log.warning("warning: %s has no metrics of step %s; they are lost", directory.path / LINES[0], lost)
    if decision.rewinds:
        rewind(directory, step)


def rewind(directory: RunDirectory, step: int) -> None:
    """Move the results after `step` to a new run directory beside the run, and make `latest` name `step`. At step 0,
    which has no checkpoint, copy the metrics instead.

    An interrupted move loses nothing: the same command completes it.
    """
    run, checkpoints = directory.path, directory.path / "checkpoints"
    if not step:
        kept = aside(run / LINES[0])
        shutil.copy2(run / LINES[0], kept)
        log.warning("warning: no checkpoint was written; the run starts again, and its metrics are kept in %s", kept)
        return
    later = [each for each in folder.steps(checkpoints) if each > step]
    if later or (directory.done and _last_step(run / LINES[0]) > step):
        log.info("results after step %d are kept in %s", step, _moved(run, later))
    folder.point_to(checkpoints, step)
    for name in ("DONE", EVALUATION):
        (run / name).unlink(missing_ok=True)


def _moved(run: Path, later: Sequence[int]) -> Path:
    """Create a run directory with copies of a run's files, move the later checkpoints there, and return its path."""
    kept = aside(run)
    (kept / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "recipe.json", *LINES, "DONE", "PREEMPTED", "DIVERGED", "config.yaml", EVALUATION):
        if (run / name).exists():
            shutil.copy2(run / name, kept / name)
    for each in later[::-1]:
        folder.path_of(run / "checkpoints", each).rename(folder.path_of(kept / "checkpoints", each))
    if later:
        folder.point_to(kept / "checkpoints", later[-1])
    return kept
