"""The profiler's window, memory snapshots and errors of memory: what is written and when; training is left alone."""

import gzip
import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.train.diagnostics import kernel_times, out_of_memory, snapshots
from lowprec_train.train.diagnostics.kernel_times import KernelTime
from lowprec_train.train.diagnostics.out_of_memory import OutOfMemory
from lowprec_train.train.diagnostics.profiling import Window
from lowprec_train.train.diagnostics.snapshots import Snapshots
from tests.train.standins import Lines, Model, bits, make_trainer, same

CPU = torch.device("cpu")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def fit(trainer, begin_step=lambda step: None):
    sink = Lines()
    trainer.fit(sinks=[sink], begin_step=begin_step)
    return sink.column("train/loss")


def trace(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_window_is_traced_and_the_run_is_the_same(device, tmp_path):
    plain, watched = make_trainer(steps=6, device=device), make_trainer(steps=6, device=device)
    window = Window(first=3, steps=2, directory=tmp_path / "profile", device=torch.device(device), record_shapes=True)
    assert fit(plain) == fit(watched, window.begin_step) and same(bits(plain), bits(watched))
    window.close()
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "steps-3-4.rank-0.json.gz",
        "steps-3-4.rank-0.txt",
    }
    events = trace(tmp_path / "profile" / "steps-3-4.rank-0.json.gz")
    assert {e["name"] for e in events if e["name"].startswith("ProfilerStep")} == {"ProfilerStep#1", "ProfilerStep#2"}
    backward = [e for e in events if e["name"] == "autograd::engine::evaluate_function: AddmmBackward0"]
    assert len(backward) == 2 * 2  # steps, micro-batches of a step
    assert (device == "cuda") is any(e.get("cat") == "kernel" for e in events)
    text = (tmp_path / "profile" / "steps-3-4.rank-0.txt").read_text()
    assert "ms a step over 2 steps" in text and ("aten::addmm" in text or device == "cuda")


@pytest.mark.parametrize(
    ("first", "steps", "begins", "steps_seen"),
    [(1, 1, 1, 1), (5, 9, 1, 2), (2, 2, 2, 2), (3, 0, 1, None), (2, 2, 3, None), (6, 1, 1, 1)],
)
def test_windows_at_the_edges(first, steps, begins, steps_seen, tmp_path, caplog):
    """At the first step, beyond the last one, where a launch resumes, none, before the launch, at the last step."""
    window = Window(first=first, steps=steps, directory=tmp_path, device=CPU)
    for step in range(begins, 7):
        window.begin_step(step)
        torch.ones(3).cumsum(0)
    window.close()
    window.close()
    files = list(tmp_path.glob("*.json.gz"))
    assert len(files) == (steps_seen is not None)
    if files:
        assert files[0].name == f"steps-{first}-{first + steps_seen - 1}.rank-0.json.gz"
        assert sum(e["name"] == "aten::cumsum" for e in trace(files[0])) == steps_seen
        assert f"ms a step over {steps_seen} steps\n" in next(tmp_path.glob("*.txt")).read_text()
    assert ("no profile" in caplog.text) is (begins > first)


def test_no_window_no_profiler(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.profiler, "profile", None)
    fit(make_trainer(steps=3), Window(first=1, steps=0, directory=tmp_path, device=CPU).begin_step)


def test_the_table_sums_by_class():
    kernels = [
        KernelTime(name="ncclDevKernel_ReduceScatter_Sum_f32", calls=2, ms=1.0),
        KernelTime(name="nvjet_a", calls=4, ms=6.0),
        KernelTime(name="cutlass_b", calls=4, ms=3.0),
    ]
    lines = kernel_times.table(kernels, steps=2).splitlines()
    assert lines[0] == "5.000 ms a step over 2 steps"
    rows = [line.split() for line in lines if "%" in line]
    assert rows[:2] == [["90.0%", "4.500", "4.0", "gemm"], ["10.0%", "0.500", "1.0", "communication"]]
    assert [row[-1] for row in rows[2:]] == ["nvjet_a", "cutlass_b", "ncclDevKernel_ReduceScatter_Sum_f32"]


def test_kernels_of_lambdas_count_and_spans_do_not():
    """torch's own kernels carry `{lambda()#3}` in their names, as spans carry a sign and a number."""
    lambdas = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
    cast = f"void at::native::unrolled_elementwise_kernel<{lambdas}>(int)"
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>::{lambda(float)#1}>()"
    spans = ("Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad", "ProfilerStep#2", "## Call CompiledFx")

    def event(name, user=False):
        took = SimpleNamespace(elapsed_us=lambda: 2000.0)
        return SimpleNamespace(name=name, is_user_annotation=user, device_type="DeviceType.CUDA", time_range=took)

    events = [event(cast), event(add), event(cast), *map(event, spans), event("a phase", user=True)]
    found = kernel_times.kernel_times(events, on_gpu=True)
    assert [(each.name, each.calls, each.ms, each.kind) for each in found] == [
        (cast, 2, 4.0, "copy"),
        (add, 1, 2.0, "norm, elementwise"),
    ]


@pytest.fixture
def saved(monkeypatch):
    """Snapshots that would be written, as on a GPU."""
    written = []
    monkeypatch.setattr(snapshots, "save", written.append)
    return written


def request(run, at):
    (run / "SNAPSHOT").touch()
    os.utime(run / "SNAPSHOT", ns=(at, at))


def test_a_request_is_answered_once(tmp_path, saved):
    request(tmp_path, 1)  # left from an earlier launch
    asked = Snapshots(tmp_path, torch.device("cuda", 0), patience=0, rank=3)
    other = Snapshots(tmp_path, torch.device("cuda", 0), patience=0, on_request=False)
    hurried = Snapshots(tmp_path, torch.device("cuda", 0), patience=1e9)
    for step in range(1, 8):
        if step in (3, 6):
            request(tmp_path, step)
        if step == 5:
            (tmp_path / "SNAPSHOT").unlink()
        for each in (asked, other, hurried):
            each.begin_step(step)
    assert saved == [tmp_path / "memory" / f"step-{step}.rank-3.pickle" for step in (3, 6)]


def test_a_request_on_a_cpu_is_reported_that_there_is_nothing(tmp_path, saved, caplog):
    asked = Snapshots(tmp_path, CPU, patience=0)
    request(tmp_path, 1)
    asked.begin_step(1)
    assert not saved and "snapshots are of GPU memory, and this run is on cpu" in caplog.text


def full_disk(path):
    raise OSError(28, "No space left on device", str(path))


def test_a_snapshot_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshots, "save", full_disk)
    asked = Snapshots(tmp_path, torch.device("cuda", 0), patience=0)
    request(tmp_path, 1)
    asked.begin_step(1)
    assert "no memory snapshot: [Errno 28] No space left on device" in caplog.text


def test_a_request_that_cannot_be_looked_for_is_warned_of_once(tmp_path, saved, monkeypatch, caplog):
    request(tmp_path, 1)
    asked = Snapshots(tmp_path, torch.device("cuda", 0), patience=0)

    def stale(path):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(type(tmp_path), "stat", stale)
        asked.begin_step(1)
        asked.begin_step(2)
    asked.begin_step(3)
    assert caplog.text.count("SNAPSHOT: cannot check for this file (Stale file handle)") == 1 and not saved
    request(tmp_path, 2)
    asked.begin_step(4)
    assert len(saved) == 1


def run_out(asked):
    """A trainer whose third step asks for too much."""
    model = Model()
    loss = model.loss

    def greedy(*arguments):
        if trainer.steps_done == 2:
            asked()
        return loss(*arguments)

    model.loss = greedy
    trainer = make_trainer(steps=5, model=model, optimizer=CodedOptimizer(parameter_groups(model, 0.1)))
    return trainer


def test_out_of_memory_on_a_cpu_is_one_line(tmp_path):
    seen = Snapshots(tmp_path, CPU)
    trainer = run_out(lambda: torch.empty(2**50))
    with pytest.raises(OutOfMemory) as caught, out_of_memory.converted(CPU), seen.of_failures():
        fit(trainer, seen.begin_step)
    line = str(caught.value)
    assert line.startswith("out of memory on the CPU in step 3: 4503599627370496 bytes requested. Try a smaller micro_")
    assert "\n" not in line and "lowprec estimate" in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("asked", "fits"), [("2.00 GiB", True), ("28.40 GiB", True), ("64.00 GiB", False)])
def test_out_of_memory_on_a_gpu_leaves_a_snapshot(asked, fits, tmp_path, saved, monkeypatch):
    gib = 2**30
    for name, value in {
        "get_device_name": "NVIDIA X",
        "memory_allocated": 50 * gib,
        "memory_reserved": 78 * gib,
        "mem_get_info": (gib // 2, 80 * gib),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    cuda = torch.device("cuda", 0)
    seen = Snapshots(tmp_path, cuda, rank=1)

    def fail():
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of")

    with pytest.raises(OutOfMemory) as caught, out_of_memory.converted(cuda), seen.of_failures():
        fit(run_out(fail), seen.begin_step)
    path = tmp_path / "memory" / "oom-step-3.rank-1.pickle"
    line = str(caught.value)
    assert saved == [path] and line.endswith(f"memory snapshot: {path}") and ("fragmented" in line) is fits
    assert line.startswith(
        f"out of memory on NVIDIA X in step 3: {asked} requested. torch has allocated 50.0 GiB of 80.0 and "
        "reserves 28.0 more, 0.5 are free. "
    )


def test_out_of_memory_is_reported_also_where_its_snapshot_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "save", full_disk)
    seen = Snapshots(tmp_path, torch.device("cuda", 0))
    seen.begin_step(3)
    with pytest.raises(torch.OutOfMemoryError, match="GPU") as caught, seen.of_failures():
        raise torch.OutOfMemoryError("GPU out of memory")
    where, why = caught.value.__notes__
    assert where == "in step 3" and why.startswith("no memory snapshot: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), ": 4096 bytes"),
        (MemoryError(), ""),
    ],
)
def test_the_memory_of_the_host_of_a_gpu_is_the_hosts(error, asked, tmp_path, saved):
    cuda = torch.device("cuda", 0)
    seen = Snapshots(tmp_path, cuda)
    with pytest.raises(OutOfMemory) as caught, out_of_memory.converted(cuda), seen.of_failures():
        raise error
    told = str(caught.value)
    assert told.startswith(f"out of memory on the CPU in step 0{asked}") and "torch has" not in told and not saved


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("NCCL error: ... Cuda failure 2 'out of memory'"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    with pytest.raises(OutOfMemory if expected else type(error)), out_of_memory.converted(CPU):
        raise error


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu_knows_who_asked(tmp_path):
    device = torch.device("cuda", 0)
    seen = Snapshots(tmp_path, device, patience=0)
    with snapshots.recorded_history(1000):
        kept = torch.empty(3 << 20, dtype=torch.uint8, device=device)
        request(tmp_path, 1)
        seen.begin_step(7)
        failing = pytest.raises(OutOfMemory, match="in step 7: .*GiB requested")
        with failing, out_of_memory.converted(device), seen.of_failures():
            torch.empty(1 << 45, dtype=torch.uint8, device=device)
    for name in ("step-7.rank-0.pickle", "oom-step-7.rank-0.pickle"):
        snapshot = pickle.loads((tmp_path / "memory" / name).read_bytes())
        sizes = [b["size"] for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
        assert kept.numel() in sizes
        (event,) = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] == kept.numel()]
        assert any(frame["name"] == "test_a_snapshot_of_a_gpu_knows_who_asked" for frame in event["frames"])
