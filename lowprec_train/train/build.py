"""Build a run: turn a configuration into a model, a corpus, an optimizer and a trainer.

Packages below `train/` take plain values, not configurations. `construct` builds the object of each `_target_` node and
raises ValueError for wrong arguments. The model is laid out on the meta device and checked there before memory is
allocated.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowprec_train.config import PhaseConfig, RunConfig, run_and_step
from lowprec_train.data.corpus import Corpus
from lowprec_train.data.tokenizer import check_vocabulary
from lowprec_train.model.transformer import Fill, Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.ops.library import live_kernels
from lowprec_train.optim.accumulation import GradientSum
from lowprec_train.optim.schedule import before_decay
from lowprec_train.parallel import tensor
from lowprec_train.precision import policy
from lowprec_train.precision.gemm import BLOCK_SCALED
from lowprec_train.precision.recipe import LinearRecipe, override
from lowprec_train.precision.saved_activations import SavedActivationPolicy
from lowprec_train.precision.schedule import Phase, PrecisionSchedule, first_step, forward_only
from lowprec_train.train import build_optimizer, checks, launch
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.checkpoint_folder import steps
from lowprec_train.train.construct import construct
from lowprec_train.train.describe import Choice, MetaModel, Plans, backend, by_reference, device_name, versions
from lowprec_train.train.diagnostics.profiling import Window
from lowprec_train.train.diagnostics.snapshots import Snapshots, recorded_history
from lowprec_train.train.diagnostics.telemetry import Row, Telemetry
from lowprec_train.train.distribute import Distribution, distribute
from lowprec_train.train.exclusions import Choices, check_settings
from lowprec_train.train.garbage import collected_every
from lowprec_train.train.heap import HeapTrim
from lowprec_train.train.identity import comparison
from lowprec_train.train.launch import ALONE, World, host_group
from lowprec_train.train.lint import execution as lint_execution
from lowprec_train.train.lint import recipes as lint_recipes
from lowprec_train.train.lint import training as lint_training
from lowprec_train.train.lint.rules import Report, RunPlan, examine, layer_groups, refuse, rules_of
from lowprec_train.train.logging.metrics import Throughput, flops_per_token, peak_flops
from lowprec_train.train.logging.sinks import JsonlSink, RunFacts, Sink, StepLines
from lowprec_train.train.rundir import RunDirectory
from lowprec_train.train.trainer import Trainer, TrainingOptions
from lowprec_train.train.weights import RunWeights, Weights, check_sizes, open_weights, without_memory

log = logging.getLogger(__name__)

LINT_RULES = rules_of(lint_recipes, lint_execution, lint_training)


def recipes(nodes: Mapping[str, Any], override_tree: Mapping[str, Any]) -> dict[str, LinearRecipe]:
    """Return pattern -> recipe of a policy's nodes. The override is applied to every recipe that quantises."""
    built: dict[str, LinearRecipe] = {p: construct(node, f"precision.policy.'{p}'") for p, node in nodes.items()}
    if not override_tree:
        return built
    return {p: r if r.is_identity else override(r, override_tree) for p, r in built.items()}


def layout(run: RunConfig) -> MetaModel:
    """Return model and policy on the meta device, checked against each other. Allocates no memory at any size."""
    model = without_memory(run.model)
    made, form, tokens = phases(run, model), run.parallel.param_all_gather, run.micro_batch * run.data["seq_len"]
    check_settings(run, made)
    for phase in made:
        checks.linears(model, phase.recipes, tokens=tokens)
        phase.saved_activations.check(model)
    return MetaModel(model=model, phases=made, tokens=tokens, param_all_gather=form, compile=run.compile)


def choices(run: RunConfig, laid_out: MetaModel) -> Choices:
    """Return the settings that `check_memory` and `check_libraries` compare."""
    return Choices(
        run=run,
        phases=laid_out.phases,
        rule=build_optimizer.rules(run)[0],
        codecs=build_optimizer.codecs(run),
        sums=build_optimizer.grad_accumulation(run),
        columns=tensor.row_parallel_columns(laid_out.model),
    )


def gemms_to_check(plans: Sequence[Plans], device: torch.device) -> dict[str, Any]:
    """Return what `self_test` takes: the formats of block-scaled GEMMs, and whether a GPU multiplies decoded values."""
    paths = frozenset(one.path.name for phase in plans for each in phase.values() for one in each.gemms().values())
    return {"block_formats": paths & set(BLOCK_SCALED), "decoded": device.type == "cuda" and "DEQUANTIZE" in paths}


def lint(run: RunConfig, laid_out: MetaModel, plans: Sequence[Plans], device: torch.device) -> Report:
    """Run the start-up linter. Raises ValueError if it finds an error. plans: from `MetaModel.plans`."""
    report = examine(plan(run, laid_out, plans, device), LINT_RULES, allow=run.lint_allow)
    refuse(report)
    return report


def plan(run: RunConfig, laid_out: MetaModel, plans: Sequence[Plans], device: torch.device) -> RunPlan:
    """Return the values that the linter's rules read."""
    return RunPlan(
        run=run,
        layer_groups=layer_groups(laid_out.phases, plans),
        codecs=build_optimizer.codecs(run),
        rule=build_optimizer.rules(run)[0],
        learning_rate=construct(run.optim.schedule, "optim.schedule"),
        on_gpu=device.type == "cuda",
    )


def phases(run: RunConfig, model: Transformer) -> tuple[Phase, ...]:
    """Return the run's first phase and the phases of its precision schedule."""
    precision = run.precision
    table = policy.resolve(model, recipes(precision.policy, precision.override))
    made = [Phase(first_step=0, recipes=table, saved_activations=saved_activations(precision.saved_activations))]
    for name, later in sorted(precision.schedule.items(), key=lambda item: item[1].at):
        try:
            made.append(_later(run, model, made[-1], later))
        except ValueError as error:
            raise ValueError(f"precision.schedule.{name}: {error}") from None
    if precision.override and all(recipe.is_identity for phase in made for recipe in phase.recipes.values()):
        changes = f"precision.override={precision.override} changes nothing"
        raise ValueError(f"{changes}: precision={precision.name} quantises nothing")
    return tuple(made)


def _later(run: RunConfig, model: Transformer, before: Phase, later: PhaseConfig) -> Phase:
    table = policy.resolve(model, recipes(later.policy, run.precision.override))
    saved = saved_activations(later.saved_activations)
    if later.forward_only:
        table = {name: forward_only(before.recipes[name], target) for name, target in table.items()}
        saved = before.saved_activations
    return Phase(first_step=first_step(later.at, run.steps), recipes=table, saved_activations=saved)


def saved_activations(node: Mapping[str, Any]) -> SavedActivationPolicy:
    """Return the policy for what norms and activations save. With an empty node they save their inputs."""
    return construct(node, "precision.saved_activations") if node else SavedActivationPolicy()


def distribution(run: RunConfig, laid_out: MetaModel, world: World, device: torch.device) -> Distribution:
    """Shard the laid-out model over the processes. With one process nothing is sharded."""
    grid = checks.layout(run, world.processes)
    chosen = choices(run, laid_out)
    chosen.check_memory(grid, on_gpu=device.type == "cuda")
    chosen.check_graph()
    node_size = run.comm.get("node_size") or world.local_processes
    checks.symmetric_memory(run, grid, construct(run.comm, "comm").codec, device, node_size or grid.processes)
    return distribute(
        laid_out.model,
        grid,
        device,
        phases=laid_out.phases,
        values=build_optimizer.codecs(run).master.parameter_dtype,
        tokens=run.micro_batch * run.data["seq_len"],
        reshard=run.parallel.reshard_after_forward,
        blocks_per_unit=run.parallel.blocks_per_unit,
        timeout=timedelta(minutes=run.parallel.timeout_minutes),
        node_size=node_size,
    )


def weights(
    model: Transformer, device: torch.device, seed: int, fill: Fill | None = None, *, on_host: bool = False
) -> SeedTable:
    """Allocate the model on `device`, initialise its weights and return its seeds. fill: as in
    `Transformer.init_weights`.

    on_host: allocate the weights in host memory, because in FP32 they may not fit on the device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # compiled kernels are launched on the current device
    model.to_empty(device="cpu" if on_host else device)
    model.init_weights(seed, fill)
    return SeedTable(seed, model.number_sites(), device)


def first_weights(run: RunConfig, directory: Path, begun: int | None = None) -> Weights | None:
    """Open and check the weights that `weights` names. Returns None if it is null, or if the run in `directory` has a
    checkpoint: a resumed run does not need its initial weights, which may have been deleted.

    begun: step of the checkpoint from which an earlier launch initialised this run. Without it, a source run that is
    named without a step is read at its newest checkpoint, as seen by rank 0, because that run may still be training.

    Raises ValueError if the weights cannot be read or belong to another model.
    """
    if run.weights is None or launch.first(lambda: steps(directory / "checkpoints")):
        return None
    path, named = run_and_step(Path(run.weights).expanduser())
    opened = open_weights(path, begun if named is None else named)
    check_sizes(run.model, opened)
    return opened


def begun_with(opened: Weights | None, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of run.json about `first_weights`. saved: the existing run.json."""
    if opened is None:
        return {key: saved.get(key) for key in ("weights", "weights_step")}
    return {"weights": opened.source, "weights_step": opened.step if isinstance(opened, RunWeights) else None}


def corpus(run: RunConfig) -> Corpus:
    """Return the corpus, prepared on first use. Raises ValueError if its token ids exceed model.vocab_size."""
    built: Corpus = construct(run.data, "data")
    check_vocabulary(
        tokenizer=built.vocab_size, vocab_size=run.model.vocab_size, name=built.name, setting="model.vocab_size"
    )
    return built


def trainer(
    run: RunConfig,
    laid_out: MetaModel,
    plans: Sequence[Plans],
    text: Corpus,
    distribution: Distribution,
    device: torch.device,
    *,
    compiled: bool,
    fill: Fill | None = None,
) -> Trainer:
    """Return the trainer of a run at its first step. plans: from `MetaModel.plans`. fill: initialises this process's
    shards of the parameters; None: they are drawn from the seed.
    """
    choices(run, laid_out).check_libraries(device)
    model, on_host = laid_out.model, run.optim.offload and device.type == "cuda"
    seeds = weights(model, device, run.seed, fill or distribution.fill, on_host=on_host)
    shards = distribution.shards(model)
    updates = build_optimizer.optimizer(run, model, shards, device if on_host else None, distribution.sizes.dp)
    sums = build_optimizer.grad_accumulation(run)
    if on_host:
        model.to(device)  # buffers, and parameters that the optimizer does not offload
    whole_sum = None if sums is None else lambda place: GradientSum(sums, seed=run.seed, place=place)
    rates = [throughput(run, model, each, device, distribution.sizes.processes) for each in plans]
    later = tuple((phase.first_step, rate) for phase, rate in zip(laid_out.phases[1:], rates[1:], strict=True))
    precision = PrecisionSchedule(laid_out.phases)
    precision.begin(model, 0)
    if compiled:
        torch.compiler.reset()  # earlier jobs of a sweep leave graphs of the same code, and torch keeps only a few
        model.compile_blocks(fullgraph=precision.one_graph)
    numbers = {each.name: getattr(run, each.name) for each in fields(TrainingOptions) if hasattr(run, each.name)}
    return Trainer(
        TrainingOptions(
            seq_len=run.data["seq_len"],
            throughput=replace(rates[0], later=later),
            in_backward=run.optim.in_backward,
            grad_accumulation=sums,
            **numbers,
        ),
        model=model,
        optimizer=updates,
        schedule=construct(run.optim.schedule, "optim.schedule"),
        corpus=text,
        seeds=seeds,
        precision=precision,
        telemetry=Telemetry(
            model,
            updates,
            interval=run.telemetry_interval,
            tp=distribution.tp_group,
            first_data=distribution.first_data,
        ),
        data_parallel=distribution.data_parallel(
            model,
            run.parallel,
            reduction=construct(run.comm, "comm"),
            micro_batches=run.micro_batches(distribution.sizes.dp),
            measured=not run.cuda_graph,
            whole_sum=whole_sum,
        ),
        placements=distribution.placements,
        shards=shards,
    )


def throughput(run: RunConfig, model: Transformer, plans: Plans, device: torch.device, gpus: int = 1) -> Throughput:
    """Return the throughput metrics of the run's steps. Each GEMM is compared with the peak of its execution path. The
    log names the metrics that are left out because a peak is unknown.
    """
    name = device_name(device)
    kinds = {layer: each.peaks() for layer, each in plans.items()}
    rates = Throughput(
        tokens_per_step=run.tokens_per_step,
        flops_per_token=flops_per_token(
            model, kinds=kinds, attention_flops=model.attention_flops_per_token(run.data["seq_len"])
        ),
        peaks=peak_flops(name),
        gpus=gpus,
    )
    if without := rates.without_peak():
        also = "" if rates.peaks else " and perf/mfu_bf16peak"
        log.info("no peak FLOP/s known for %s on %r: perf/sol%s left out", ", ".join(without), name, also)
    return rates


def checkpointer(run: RunConfig, directory: Path) -> Checkpointer:
    """Return the checkpointer of `<run directory>/checkpoints`. Asynchronous saves use a separate process group."""
    return Checkpointer(
        directory / "checkpoints",
        interval=run.checkpoint_interval,
        keep=run.checkpoint_keep,
        asynchronous=run.checkpoint_async,
        verify=run.checkpoint_verify,
        kept=before_decay(construct(run.optim.schedule)),
        process_group=host_group(run.parallel.timeout_minutes) if run.checkpoint_async else None,
    )


@contextmanager
def sinks(run: RunConfig, about: Trainer, directory: RunDirectory, plain: Mapping[str, Any]) -> Iterator[list[Sink]]:
    """Open metrics.jsonl and the sinks of `logger`; close them at the end. Processes that do not hold the directory get
    no sinks. plain: the resolved configuration.
    """
    if not directory.held:
        yield []
        return
    facts = RunFacts(
        name=directory.path.name,
        directory=directory.path,
        steps=run.steps,
        resumed_step=about.steps_done,
        config=plain,
        recipe=directory.read("run.json")["recipe"],
        comparison=comparison(plain),
        remembered=about.remembered,
    )
    makers: list[Callable[..., Sink]] = [JsonlSink]
    makers += [partial(construct, node, f"logger.{name}") for name, node in run.logger.items()]
    with ExitStack() as stack:
        yield [stack.enter_context(closing(make(run=facts))) for make in makers]


@contextmanager
def rows(run: RunConfig, about: Trainer, directory: RunDirectory) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Yield a writer of telemetry rows to telemetry.jsonl. A run without telemetry does not have this file. Processes
    that do not hold the directory write nothing.
    """
    path = directory.path / "telemetry.jsonl"
    if not directory.held or not (run.telemetry_interval or path.exists()):
        yield lambda rows: None
        return
    with closing(StepLines(path, resumed_step=about.steps_done)) as lines:
        yield lines.write


@contextmanager
def watch(
    run: RunConfig, directory: Path, device: torch.device, world: World = ALONE, *others: Callable[[int], None]
) -> Iterator[Callable[[int], None]]:
    """Yield a callable that runs before each step: profiler, snapshots, garbage collection, heap trimming, `others`."""
    profile, chosen = run.profile, world.rank in run.profile.ranks
    window = Window(
        first=profile.first,
        steps=profile.steps if chosen else 0,
        directory=directory / "profile",
        device=device,
        rank=world.rank,
        record_shapes=profile.shapes,
        with_stack=profile.stacks,
        profile_memory=profile.memory,
    )
    snapshots = Snapshots(directory, device, rank=world.rank, on_request=chosen)
    watchers: list[Callable[[int], None]] = [HeapTrim(device), *others, window.begin_step, snapshots.begin_step]

    def begin_step(step: int) -> None:
        for each in watchers:
            each(step)

    collected = collected_every(run.gc_interval)
    with recorded_history(profile.allocations), closing(window), snapshots.of_failures(), collected as collect:
        watchers.append(collect)
        yield begin_step


def facts(
    run: RunConfig, choice: Choice, laid_out: MetaModel, device: torch.device, *, compiled: bool
) -> dict[str, Any]:
    """Return run.json's facts of a run, except for its configuration; `text_facts` adds those of the corpus."""
    model, documents = laid_out.model, bool(run.data.get("document_mask"))
    return {
        "recipe": choice.recipe,
        "model": run.model.name,
        "deviations": run.precision.deviations,
        "overrides": choice.overrides,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": device_name(device),
        "compiled": compiled,
        "attention": model.attention_backend(device, run.data["seq_len"], documents),
        "kernels": live_kernels(device),
        "by_reference": by_reference(laid_out.phases, device),
        **backend(laid_out.phases),
        "versions": versions(),
    }
