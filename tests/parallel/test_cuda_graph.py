"""A step recorded as a CUDA graph has the bits of one that is launched kernel by kernel; what a graph excludes."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lowprec_train.ops.library import SERVED
from lowprec_train.parallel import data
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train import build
from lowprec_train.train.checkpoint import Checkpointer
from lowprec_train.train.cuda_graph import WARM_UP, GraphedPasses
from lowprec_train.train.exclusions import Choices
from lowprec_train.train.launch import ALONE, World
from tests.distributed import run_distributed
from tests.parallel.graphed import CASES, SENT, STEPS, described, trained, work
from tests.parallel.runs import CPU, MICRO, SEQ, TINY, Walks
from tests.recipes import composed
from tests.train.standins import Corpus

LAYOUTS = {"dp2": Sizes(dp_shard=2), "tp2": Sizes(tp=2), "replicate2-shard2": Sizes(dp_replicate=2, dp_shard=2)}
WHOLE = Sizes()


def assert_same(launched, repeated):
    parameters, others = launched.pop("parameters"), repeated.pop("parameters")
    assert launched == repeated
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, others, strict=True))
    assert len(set(launched["loss"])) == len(launched["loss"]), "each step computes its own loss"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case not in SENT])
def test_a_graph_has_the_bits_of_launched_kernels(case, accumulation):
    runs = [trained(described(case, WHOLE, graph=graph, accumulation=accumulation)) for graph in (False, True)]
    assert_same(*runs)


@pytest.mark.gpu
def test_a_graph_of_compiled_blocks():
    assert_same(*(trained(described("fp8", WHOLE, graph=graph, compiled=True)) for graph in (False, True)))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_with_collectives(layout):
    """Few runs: each has communicators of its own, which take memory until the processes end."""
    sizes, pairs = LAYOUTS[layout], {}
    cases = {"fp8": 2, "draws": 1}
    if layout == "dp2":
        cases |= {"coat": 1, "lean coat": 1, "sums": 2, "sums of shards": 2} | dict.fromkeys(SENT, 1)
    for case, count in cases.items():
        pairs[case] = tuple(described(case, sizes, graph=graph, accumulation=count) for graph in (False, True))
    for results in run_distributed(work, sizes, pairs, sizes.processes, backend="nccl", timeout=280):
        for launched, repeated in results.values():
            assert_same(launched, repeated)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("optim.offload=true",), "optim.offload=True: the host starts its copies; use optim.offload=False"),
        (("model.offload=true", "model.recompute=full"), "model.offload=True"),
        (("profile.steps=2",), "profile.steps=2: a step that is recorded under torch's profiler may never end"),
        (("telemetry_interval=4",), "telemetry_interval=4: observed steps have other kernels"),
        (("comm=fp8_lm",), "the head-room of comm=.* moves between steps; use comm=fp8"),
        (("+optim/moment@optim.grad_accumulation=bf16",), "optim.grad_accumulation=BF16 is read after it"),
        (("optim.in_backward=true", "optim=apex_adamw"), "optim.backend=apex takes the learning rate from the host"),
        (("+recipe=te_fp8",), "keeps its state on the host; use a recipe of this package"),
    ],
)
def test_what_a_graph_excludes(words, said):
    run = composed("device=cpu", "cuda_graph=true", *words)
    with pytest.raises(ValueError, match=said):
        build.choices(run, build.layout(run)).check_graph()


def test_an_estimate_refuses_what_a_run_refuses():
    with pytest.raises(ValueError, match="telemetry_interval=4: observed steps have other kernels"):
        Subject(run=composed("cuda_graph=true", "telemetry_interval=4"), gpus=1)


def test_what_a_graph_needs_of_a_machine(monkeypatch):
    run = composed("cuda_graph=true", "optim.in_backward=true")
    chosen = build.choices(run, build.layout(run))
    with pytest.raises(ValueError, match="cuda_graph=true needs a CUDA GPU, and this run is on cpu .device=auto."):
        chosen.check_libraries(CPU)
    monkeypatch.setitem(SERVED, "cuda", frozenset())
    with pytest.raises(ValueError, match="optim.in_backward=true needs the compiled kernel of AdamW"):
        chosen.check_libraries(torch.device("cuda"))


class Repeated:
    """A graph on a CPU that repeats nothing."""

    def replay(self):
        pass


class Stream:
    """A stream on a CPU. waited: pairs of (stream, what it has waited for)."""

    waited: ClassVar[list] = []

    def __init__(self, *unused):
        pass

    def wait_stream(self, other):
        self.waited.append((self, other))


@pytest.fixture
def streams(monkeypatch):
    """What CUDA does is left out; what the host does for a step is what it does on a GPU. Returns two streams of
    collectives.
    """
    sides, current = [Stream(), Stream()], Stream()
    monkeypatch.setattr(Stream, "waited", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *unused, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Choices, "check_libraries", lambda self, device: None)
    monkeypatch.setattr(data, "communication_streams", lambda root: sides)
    return sides


@pytest.fixture
def two_ranks(streams):
    """This process is rank 0 of two, and collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield streams
    dist.destroy_process_group()


def run_of(*words, tokens=2 * MICRO * SEQ):
    return composed(f"tokens_per_step={tokens}", *TINY, f"steps={STEPS}", *words)


def trainer_of(run, world):
    """Its trainer on this rank, on a CPU."""
    laid_out = build.layout(run)
    distribution = build.distribution(run, laid_out, world, CPU)
    plans = laid_out.plans(CPU, shards=distribution.sizes.dp_shard)
    return build.trainer(run, laid_out, plans, Corpus(Walks(), Walks()), distribution, CPU, compiled=False)


SHARDED = ("+recipe=fp8", "parallel.dp_shard=2", "cuda_graph=true", "comm=fp8")


@pytest.mark.parametrize("words", [(), ("optim.in_backward=true",)])
def test_the_host_of_a_repeated_step(two_ranks, words):
    """Python runs no passes. Gradients of vectors and the account of what was sent are as in the recorded step."""
    trainer = trainer_of(run_of(*SHARDED, *words), World(0, 2, 0))
    seen, sent, given = [], [], []
    loss, update = trainer.loss.of_model, trainer.optimizer.step

    def watched(tokens, *others):
        seen.append(tokens)
        return loss(tokens, *others)

    def updating(**arguments):
        given.append([parameter.grad is not None for parameter in trainer.model.parameters() if parameter.ndim < 2])
        update(**arguments)

    trainer.loss.of_model, trainer.optimizer.step = watched, updating
    for _ in range(WARM_UP + 3):
        metrics = trainer.step()
        sent.append(metrics["comm/grad_bytes"])
        assert "comm/grad_sqnr_db" not in metrics, "a graph measures no step"
    assert len(seen) == WARM_UP + 1, "Python runs the passes of warm-up and recording alone"
    last = Walks().batch(WARM_UP + 2, 0, MICRO, 2 * MICRO).tokens
    assert torch.equal(seen[-1], last), "the recorded step reads the newest batch"
    assert len(set(sent)) == 1 and sent[0] > 0
    assert len(given) == WARM_UP + 3 and all(map(all, given)), "vectors are updated after the passes"
    current = torch.cuda.current_stream()
    for stream in two_ranks:
        assert [pair for pair in Stream.waited if stream in pair] == [(stream, current), (current, stream)]


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_an_evaluation_between_steps_leaves_nothing(two_ranks, gather):
    """Neither gathered weights, which the norm of the next step would take for shards, nor rounded ones."""
    trainer = trainer_of(run_of(*SHARDED, f"parallel.param_all_gather={gather}"), World(0, 2, 0))
    for _ in range(WARM_UP + 2):
        trainer.step()
    gc.collect()
    before = sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor)
    trainer.evaluate()
    trainer.step()
    sharded = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters() if parameter.ndim > 1]
    assert all(sharded)
    gc.collect()
    assert sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor) - before < 4096


def test_a_trainer_is_freed_without_the_garbage_collector(two_ranks):
    """A graph must go before the communicators that it uses, whenever Python collects."""
    trainer = trainer_of(run_of(*SHARDED), World(0, 2, 0))
    for _ in range(WARM_UP + 2):
        trainer.step()
    alive = weakref.ref(trainer), weakref.ref(trainer.passes)
    gc.disable()
    try:
        del trainer
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_an_error_while_recording_is_that_error(two_ranks, monkeypatch):
    """The end of an invalid recording raises another one; collectives' streams are joined all the same."""

    @contextmanager
    def recording(*unused, **options):
        yield
        raise RuntimeError("invalid recording")

    trainer = trainer_of(run_of(*SHARDED), World(0, 2, 0))
    for _ in range(WARM_UP):
        trainer.step()
    Stream.waited.clear()
    monkeypatch.setattr(torch.cuda, "graph", recording)

    def full(*unused):
        raise torch.OutOfMemoryError("no memory for this step")

    trainer.loss.of_model = full
    with pytest.raises(torch.OutOfMemoryError, match="no memory for this step"):
        trainer.step()
    assert all((torch.cuda.current_stream(), stream) in Stream.waited for stream in two_ranks)


@pytest.fixture
def simulated(streams, monkeypatch):
    """Graphs on a CPU: they run the recorded passes again, on the recorded inputs, into the recorded tensors. Returns
    the phases that were recorded.
    """
    recorded = []

    def record(self, micro, normalizer):
        loss = self._passes(micro, normalizer)
        gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
        recorded.append(self._schedule.current)

        def replay():
            for parameter, _ in gradients:
                parameter.grad = None
            loss.copy_(self._passes(micro, normalizer))
            for parameter, gradient in gradients:
                gradient.copy_(parameter.grad)

        self._graph, self._loss, self._gradients = Repeated(), loss, gradients
        self._graph.replay = replay

    monkeypatch.setattr(GraphedPasses, "_record", record)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return recorded


@pytest.mark.parametrize(
    ("case", "phases"), [("fp8", 1), ("draws", 1), ("phases", 2), ("document mask", 1), ("loss in chunks", 1)]
)
def test_repeated_steps_have_the_bits_of_launched_ones(simulated, case, phases):
    """Inputs are those of the step, a returned loss stays, and each phase is recorded."""
    runs = []
    for graph in ("false", "true"):
        job = described(case, WHOLE, graph=graph == "true", accumulation=2, device="cpu")
        runs.append(trained(job, device=CPU))
    assert_same(*runs)
    assert len(simulated) == phases == len(set(map(id, simulated)))


@pytest.mark.usefixtures("simulated")
def test_a_step_that_is_not_finite_is_skipped_in_a_graph_too():
    """In the warm-up and among repeated steps: the loss of these sequences is NaN."""
    bad = [Walks().batch(step, 0, MICRO, MICRO).tokens for step in (1, 5)]
    seen = []
    for graph in ("false", "true"):
        trainer = trainer_of(run_of("+recipe=fp8", f"cuda_graph={graph}", tokens=MICRO * SEQ), ALONE)
        loss = trainer.loss.of_model

        def poisoned(tokens, *others, loss=loss):
            value = loss(tokens, *others)
            return value * float("nan") if any(torch.equal(tokens, each) for each in bad) else value

        trainer.loss.of_model = poisoned
        lines = [trainer.step() for _ in range(8)]
        seen.append(repr([(float(line["train/loss"]), float(line["train/skipped"])) for line in lines]))
    assert seen[0] == seen[1] and [float(line["train/skipped"]) for line in lines] == [0, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.usefixtures("simulated")
def test_a_run_is_resumed_before_and_behind_a_recording(tmp_path):
    """Three runs of the same steps: without a graph, with one, and stopped in the warm-up and among repeated steps."""
    losses = []
    for graph, stops in (("false", ()), ("true", ()), ("true", (2, 6))):
        found, checkpointer = [], Checkpointer(tmp_path / f"{graph}-{len(stops)}", interval=1, keep=9)
        for last in (*stops, 9):
            trainer = trainer_of(run_of("+recipe=coat", f"cuda_graph={graph}", tokens=MICRO * SEQ), ALONE)
            if found:
                checkpointer.load(trainer.checkpoint_parts())
            while trainer.steps_done < last:
                found.append(float(trainer.step()["train/loss"]))
            checkpointer.save(trainer.checkpoint_parts(), trainer.steps_done, wait=True)
        losses.append(found)
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 9
