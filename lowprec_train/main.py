"""`torchrun train.py +recipe=fp4`: compose, check, build, fit.

Hydra composes `configs/train.yaml` with the command line (`--help` lists the groups), once, or once per job under
`--multirun`. A configuration error is one line on stderr and exit status 1; `debug=true` adds the trace
(HYDRA_FULL_ERROR=1 for Hydra's own errors). A file in the run directory records how a launch ended: DONE, PREEMPTED or
DIVERGED. Under torchrun the exit status is that of its agent.
"""

import dataclasses
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowprec_train import config
from lowprec_train.config import Resume, RunConfig
from lowprec_train.ops.kernels import KernelError
from lowprec_train.ops.self_test import self_test_once
from lowprec_train.train import (
    build,
    checks,
    command_line,
    continuation,
    cuda_allocator,
    describe,
    identity,
    launch,
    rendezvous,
    rundir,
    signals,
)
from lowprec_train.train.checkpoint import CheckpointError
from lowprec_train.train.compose import typed
from lowprec_train.train.describe import Choice
from lowprec_train.train.diagnostics import failure, flight, out_of_memory
from lowprec_train.train.diagnostics.divergence import NothingTrained, TrainingDiverged
from lowprec_train.train.diagnostics.hang import PeerLost, Watch
from lowprec_train.train.diagnostics.out_of_memory import OutOfMemory
from lowprec_train.train.launch import World
from lowprec_train.train.logging import overview
from lowprec_train.train.rendezvous import PATIENCE, Refusal, Rendezvous
from lowprec_train.train.rundir import RunDirectory
from lowprec_train.train.signals import StopRequest
from lowprec_train.train.stop_consensus import StopConsensus
from lowprec_train.train.trainer import Trainer
from lowprec_train.train.weights import fill_from, other_tokenizer

log = logging.getLogger(__name__)

# Reported in one line, without a trace.
EXPECTED: tuple[type[Exception], ...]
EXPECTED = (ValueError, OSError, OmegaConfBaseException, CheckpointError, TrainingDiverged, KernelError, OutOfMemory)
EXPECTED += (PeerLost, NothingTrained)


def main() -> None:
    """Entry point of train.py and of `python -m lowprec_train.main`: reads the command line, exits."""
    logging.raiseExceptions = False  # a line that cannot be written, to a closed pipe say, is no reason for a trace
    sys.argv[1:] = command_line.options_first(sys.argv[1:])
    refuse_sweep_of_many()
    launch.end_with_launcher()
    config.register()
    statuses: list[int] = []
    refusal = Refusal(launch.world())
    with signals.listen() as stop:

        @hydra.main(version_base="1.3", config_path=str(config.directory()), config_name="train")
        def job(cfg: DictConfig) -> None:
            with refusal.lifted():
                statuses.append(status(cfg, stop))

        try:
            with refusal.kept():
                job()
        except SystemExit as end:
            refusal.print_once(end, partial(command_line.refusal, end, sys.argv[1:]))
            raise
        except KeyboardInterrupt as again:
            failure.report(f"aborted by a second interrupt{again}", printed=launch.world().leads)
            if launch.world().processes > 1:
                logging.shutdown()
                os._exit(1)  # a normal exit would join threads that wait for other ranks
            sys.exit(1)
    sys.exit(max(statuses, default=0))


def status(cfg: DictConfig, stop: StopRequest) -> int:
    """Run one job and return its exit status. An error that several ranks share is printed once, in one line."""
    world = launch.world()
    try:
        with rendezvous.met(world, rendezvous.minutes(cfg.parallel.timeout_minutes)) as meeting:
            return in_ranks(cfg, stop, meeting)
    except ValueError as error:
        failure.report(f"error{'' if world.leads else f' on rank {world.rank}'}: {error}")
        return 1


def in_ranks(cfg: DictConfig, stop: StopRequest, meeting: Rendezvous) -> int:
    """Run one job after the rendezvous and return its exit status."""
    try:
        run(cfg, stop, meeting)
    except EXPECTED as error:
        if cfg.debug:
            traceback.print_exc()
        lost = error if isinstance(error, PeerLost) else None
        if lost is None or not lost.reported:
            meeting.report(str(error), alone=lost is not None)
        if lost is not None:
            logging.shutdown()
            lost.end_absent()
            os._exit(1)  # a normal exit would join threads that wait for the lost rank
        return 1
    except Exception:
        failure.report(traceback.format_exc().rstrip())
        return 1
    return 0


def run(cfg: DictConfig, stop: StopRequest, meeting: Rendezvous) -> None:
    """Do one run, from its checks to DONE or PREEMPTED. Raises the exceptions of EXPECTED for user errors."""
    if stop():  # a signal ended the sweep
        log.info("%s: this job is not started", stop.signal_name)
        return
    cuda_allocator.expand_segments()
    world = meeting.world
    if not world.leads:
        logging.getLogger().setLevel(logging.ERROR)
    job = rendezvous.agreed(meeting, lambda: checked(cfg, world), facts_of_launch)
    directory = (job.root / job.name() / "hang").absolute()
    flight.switch_on(directory / "rank_")
    minutes, device = job.options.parallel.timeout_minutes, job.device
    watch = Watch(meeting, minutes, directory, on_gpu=device.type == "cuda")
    with watch.watching(), launch.joined(world, device, minutes, meeting.store), out_of_memory.converted(device):
        train(job, stop, watch)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The checked configuration of a run, and the device and world of this process.

    plain: the resolved configuration as plain values.
    """

    options: RunConfig
    plain: dict[str, Any]
    choice: Choice
    world: World
    device: torch.device
    compiled: bool

    @property
    def resume(self) -> Resume:
        return config.parse_resume(self.options.resume)[0]

    @property
    def root(self) -> Path:
        return Path(self.options.run_root)

    def name(self) -> str:
        """Return the name of the run: `name`, or the default name of the configuration."""
        if self.options.name is not None:
            return self.options.name
        return identity.found_name(self.root, self.plain, self.choice.recipe, self.resume)


def checked(cfg: DictConfig, world: World) -> Job:
    """Check the composed configuration. Raises ValueError for user errors."""
    hydra = HydraConfig.get()
    overrides = cast(list[str], OmegaConf.to_container(hydra.overrides.task, resolve=False))
    options = typed(cfg, overrides)
    plain = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    device, compiled = checks.configuration(options, world)
    checks.nodes(options)
    choice = Choice.of(options.precision, hydra.runtime.choices, overrides)
    return Job(options=options, plain=plain, choice=choice, world=world, device=device, compiled=compiled)


def facts_of_launch(job: Job) -> dict[str, Any]:
    """Return what must be equal on all ranks: the configuration and the versions of the code."""
    facts = identity.flatten(job.plain) | describe.versions() | {"source": rendezvous.source_hash()}
    return facts | {"kind of device": job.device.type, "compiled": job.compiled}


def train(job: Job, stop: StopRequest, hang: Watch) -> None:
    """Do one run on connected processes."""
    options, plain, device, compiled = job.options, job.plain, job.device, job.compiled
    layout = build.layout(options)
    build.choices(options, layout).check_libraries(device)
    distribution = build.distribution(options, layout, job.world, device)
    plans = layout.plans(device, shards=distribution.sizes.dp_shard)
    report = build.lint(options, layout, plans, device)
    self_test_once(device, **build.gemms_to_check(plans, device))
    name = launch.first(job.name)
    with rundir.shared(job.root, name, plain, job.resume) as directory, failure.abort_explained(directory.path, stop):
        decision = launch.first(lambda: continuation.plan(directory, options, plain))
        for line in decision.messages:
            log.info("%s", line)
        if decision.done:
            return
        facts: dict[str, Any] = {"name": name, **identity.facts(plain), **decision.facts}
        facts |= build.facts(options, job.choice, layout, device, compiled=compiled)
        facts["lint"], facts["overrides"] = report.facts, facts["overrides"] + report.overrides
        facts["saved"] = describe.saved(layout.model, layout.phases[0].saved_activations, device)
        linears, *facts["schedule"] = describe.tables(layout, plans, device)
        facts["processes"] = dataclasses.asdict(distribution.sizes)
        first = build.first_weights(options, directory.path, directory.saved.get("weights_step"))
        facts |= build.begun_with(first, directory.saved)
        announce(plain, linears, facts, job.choice, directory.path, report.lines)

        corpus = launch.after_first(lambda: build.corpus(options))
        checks.corpus(name, directory.saved.get("corpus_hash"), corpus.hash)
        if options.name is None and not directory.resumed and job.resume is Resume.auto:
            launch.first(lambda: identity.refuse_twin(job.root, name, plain, corpus.hash))
        repeated = overview.repeated_validation(plain, corpus.valid)
        mismatch = other_tokenizer(first, corpus.tokenizer) if first else ""
        for line in filter(None, (mismatch, repeated)):
            log.warning("warning: %s", line)
        fill = fill_from(first, distribution.fill) if first else None
        trainer = build.trainer(options, layout, plans, corpus, distribution, device, compiled=compiled, fill=fill)
        facts["gathered"] = trainer.data_parallel.all_gather_formats()
        checkpointer = build.checkpointer(options, directory.path)
        if directory.resumed:
            optional = trainer.data_parallel.state_parts()
            step = checkpointer.load(trainer.checkpoint_parts(), decision.step, optional=optional) or 0
            launch.first(lambda: continuation.resume_at(directory, decision, step, loaded=trainer.steps_done))
            log.info("resuming after step %d of %d", step, options.steps)
        facts |= describe.text_facts(corpus)
        log.info("%s", overview.data(facts, plain))
        directory.begin(config=plain, recipe=linears, facts=facts)
        sinks, consensus = build.sinks(options, trainer, directory, plain), StopConsensus(launch.default_group())
        watch = build.watch(options, directory.path, device, job.world, hang.begin_step)
        rows, marked = build.rows(options, trainer, directory), divergence_marked(directory, trainer)
        with closing(trainer.passes), sinks as open_sinks, rows as write_rows, watch as begin_step, marked:
            outcome = trainer.fit(
                sinks=open_sinks,
                checkpointer=checkpointer,
                should_stop=lambda: stop.number,
                consensus=consensus,
                write_rows=write_rows,
                begin_step=begin_step,
            )
            received = signal.Signals(consensus.learned).name if outcome == "preempted" else None
            directory.end(outcome, step=trainer.steps_done, signal=received)  # before slow uploads as sinks close
        log.info("%s: %s at step %d", directory.path, outcome, trainer.steps_done)


@contextmanager
def divergence_marked(directory: RunDirectory, trainer: Trainer) -> Iterator[None]:
    """Write DIVERGED to the run directory if training diverges, which is a result, unlike a crash."""
    try:
        yield
    except (TrainingDiverged, NothingTrained):
        directory.end("diverged", step=trainer.steps_done, signal=None)
        raise


def announce(
    plain: dict[str, Any],
    linears: dict[str, Any],
    facts: dict[str, Any],
    choice: Choice,
    directory: Path,
    warnings: Sequence[str],
) -> None:
    """Log what runs, the most important line first, and the warnings of the linter."""
    for line in overview.short(plain, linears, facts, str(directory)):
        log.info("%s", line)
    if choice.undone:
        log.warning("warning: %s", choice.undone)
    if facts["by_reference"]:
        log.warning(
            "warning: %s has no compiled kernel for %s; the slower reference is used",
            facts["device"],
            ", ".join(facts["by_reference"]),
        )
    for line in overview.verbose(plain, linears, facts) if plain["verbose"] else ():
        log.info("%s", line)
    for line in warnings:
        log.warning("warning: %s", line)


def refuse_sweep_of_many() -> None:
    """Refuse --multirun with several ranks, each of which would run the whole sweep. Only rank 0 prints the error."""
    try:
        world = launch.world()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if world.processes == 1 or not {"-m", "--multirun"} & set(sys.argv):
        return
    if not world.leads:
        time.sleep(PATIENCE)
        sys.exit(1)
    sys.exit(f"error: WORLD_SIZE={world.processes}: --multirun needs one process; start one run per launch")


if __name__ == "__main__":
    main()
