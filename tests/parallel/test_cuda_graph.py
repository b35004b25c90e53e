"""A step recorded as a CUDA graph has the bits of one that is launched kernel by kernel; what a graph excludes."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lowprec_train.parallel import data
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from lowprec_train.train.cuda_graph import WARM_UP
from lowprec_train.train.exclusions import Choices
from lowprec_train.train.launch import World
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
        cases |= {"coat": 1, "lean coat": 1, "sums": 2} | dict.fromkeys(SENT, 1)
    for case, count in cases.items():
        pairs[case] = tuple(described(case, sizes, graph=graph, accumulation=count) for graph in (False, True))
    for results in run_distributed(work, sizes, pairs, sizes.processes, backend="nccl", timeout=280):
        for launched, repeated in results.values():
            assert_same(launched, repeated)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "cuda_graph=true needs a CUDA GPU, and this run is on the CPU .device=cpu."),
        (("optim.offload=true",), "optim.offload=True: the host starts its copies; use optim.offload=False"),
        (("model.offload=true", "model.recompute=full"), "model.offload=True"),
        (("profile.steps=2",), "profile.steps=2: a step that is recorded under torch's profiler may never end"),
        (("telemetry_interval=4",), "telemetry_interval=4: observed steps have other kernels"),
        (("comm=fp8_lm",), "the head-room of comm=.* moves between steps; use comm=fp8"),
        (("+optim/moment@optim.grad_accumulation=bf16",), "optim.grad_accumulation=BF16 is read after it"),
        (("optim.in_backward=true", "optim=muon"), "needs the compiled kernel of AdamW"),
    ],
)
def test_what_a_graph_excludes(words, said):
    run = composed("device=cpu", "cuda_graph=true", *words)
    chosen = build.choices(run, build.layout(run))
    with pytest.raises(ValueError, match=said):
        chosen.check_graph(on_gpu=bool(words))


class Repeated:
    """A graph on a CPU: recording runs the passes, repeating does nothing."""

    def replay(self):
        pass


class NoStream:
    def __init__(self, *unused):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture
def recorder(monkeypatch):
    """What CUDA does is left out; what the host does for a step is what it does on a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *unused, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Choices, "check_graph", lambda self, *, on_gpu: None)
    monkeypatch.setattr(data, "communication_streams", lambda root: [])
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def trainer_of(run):
    """That of rank 0 of two."""
    laid_out = build.layout(run)
    distribution = build.distribution(run, laid_out, World(0, 2, 0), CPU)
    plans = laid_out.plans(CPU, shards=2)
    return build.trainer(run, laid_out, plans, Corpus(Walks(), Walks()), distribution, CPU, compiled=False)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("words", [(), ("optim.in_backward=true",)])
def test_the_host_of_a_repeated_step(words):
    """It copies the inputs, restores gradients and what was sent, and the update follows the learning rate."""
    layout = ("parallel.dp_shard=2", f"tokens_per_step={2 * MICRO * SEQ}")
    run = composed("+recipe=fp8", *layout, *TINY, "cuda_graph=true", "comm=fp8", f"steps={STEPS}", *words)
    trainer = trainer_of(run)
    seen, sent, passes, loss = [], [], trainer.passes, trainer.loss.of_model

    def watched(tokens, *others):
        seen.append(tokens)
        return loss(tokens, *others)

    trainer.loss.of_model = watched
    update, given = trainer.optimizer.step, []

    def updating(**arguments):
        given.append([parameter.grad is not None for parameter in trainer.model.parameters() if parameter.ndim < 2])
        update(**arguments)

    trainer.optimizer.step = updating
    for _ in range(WARM_UP + 3):
        metrics = trainer.step()
        sent.append(metrics["comm/grad_bytes"])
        assert "comm/grad_sqnr_db" not in metrics, "a graph measures no step"
    assert len(seen) == WARM_UP + 1, "Python runs the passes of warm-up and recording alone"
    last = Walks().batch(WARM_UP + 2, 0, MICRO, 2 * MICRO).tokens
    assert torch.equal(seen[-1], last), "the recorded step reads the newest batch"
    assert len(set(sent)) == 1 and sent[0] > 0
    assert len(given) == WARM_UP + 3 and all(map(all, given)), "vectors are updated after the passes"
    trainer.evaluate()
    trainer.step()
    sharded = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters() if parameter.ndim > 1]
    assert all(sharded), "an evaluation leaves the head gathered; the norm of a step is that of the shards"
    passes.close()


@pytest.mark.usefixtures("recorder")
def test_a_trainer_is_freed_without_the_garbage_collector():
    """A graph must go before the communicators that it uses, whenever Python collects."""
    run = composed("+recipe=fp8", "parallel.dp_shard=2", *TINY, "cuda_graph=true", f"steps={STEPS}")
    trainer = trainer_of(run)
    for _ in range(WARM_UP + 2):
        trainer.step()
    alive = weakref.ref(trainer), weakref.ref(trainer.passes)
    gc.disable()
    try:
        del trainer
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()
