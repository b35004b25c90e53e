"""Which rank is said to be missing, and what a stack says that a rank does."""

import ast
import mmap
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import lowprec_train
from lowprec_train.train.diagnostics import flight, hang
from lowprec_train.train.diagnostics.hang import Place

PACKAGE = Path(lowprec_train.__file__).parent
TORCH = Path(torch.__file__).parent / "distributed"
PLACES = {rank: Place(100 + rank, "node") for rank in range(4)}


def said(step, what, waits=True):
    return {"step": step, "what": what, "waits": waits}


def test_the_places_are_there():
    """A function that was renamed would be named no more."""
    for file, function, _ in hang.PLACES:
        source = TORCH / file if file.startswith("fsdp/") else PACKAGE / file
        tree = ast.parse(source.read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in names or not function, (file, function)


BETWEEN_TENSOR_PARALLEL_RANKS = {"group.py", "model/loss.py", "model/rows.py", "numerics/quantizer.py"} | {
    f"precision/{name}.py" for name in ("linear_gemms", "outliers", "saved")
}


def test_every_collective_has_a_place():
    """A caller of our groups without a place of its own would be reported as an exchange of activations."""
    files = [file for file, _, _ in hang.PLACES]
    known = {*files[: files.index("comm/process_group.py")], "comm/process_group.py", *BETWEEN_TENSOR_PARALLEL_RANKS}
    known |= {f"comm/{name}.py" for name in ("collectives", "shared_scale", "fsdp_backward")}  # with comm/axis.py
    called = re.compile(r"\ball_gather_each\(|\.(all_reduce_max|all_reduce_sum|all_gather|reduce_scatter)\(")
    for path in PACKAGE.rglob("*.py"):
        place = str(path.relative_to(PACKAGE))
        if not place.startswith("tools/") and called.search(path.read_text()):
            assert place in known, place


def test_a_silent_rank_is_missing():
    told = {rank: said(12, "the all-gather of weights") for rank in (0, 1)} | {3: said(12, "the agreement to stop")}
    assert hang.missing(told, 12, PLACES) == [2]
    text = hang.verdict(told, 12, PLACES, "waited 10 minutes (parallel.timeout_minutes)")
    assert text.splitlines() == [
        "step 12: ranks 0-1 in the all-gather of weights; rank 3 in the agreement to stop: "
        "waited 10 minutes (parallel.timeout_minutes)",
        "rank 2 did not arrive (process 102 on node): it is stopped, dead or cut off",
    ]


def test_ranks_that_are_elsewhere_are_missing():
    """One that still computes or reads, and one that last spoke in an earlier step."""
    told = {0: said(12, "the all-gather of weights"), 1: said(12, "train/prefetcher.py, take", waits=False)}
    told |= {2: said(11, "the all-gather of weights"), 3: said(12, "the all-gather of weights")}
    assert hang.missing(told, 12, PLACES) == [1, 2]
    lines = hang.verdict(told, 12, PLACES, "waited").splitlines()
    assert lines[1:] == [
        "rank 1 did not arrive (process 101 on node): it is in train/prefetcher.py, take",
        "rank 2 did not arrive (process 102 on node): it is stopped, dead or cut off",
    ]


def test_a_rank_that_failed_is_named_with_its_error():
    text = hang.verdict({0: said(0, "x"), 1: said(0, "x")}, 0, PLACES, "lost the connection", {2: "no space left"})
    assert text.splitlines() == [
        "before the first step: ranks 0-1 in x: lost the connection",
        "rank 2 did not arrive (process 102 on node): it failed: no space left",
        "rank 3 did not arrive (process 103 on node): it is stopped, dead or cut off",
    ]


def test_many_missing_ranks_are_counted():
    lines = hang.verdict({0: said(1, "x")}, 1, {rank: Place(rank, "n") for rank in range(64)}, "waited").splitlines()
    assert len(lines) == 5 and lines[-1] == "and 60 more: ranks 4-63"


def test_a_stack_says_what_a_rank_does():
    assert hang.doing(hang.of_frame(sys._getframe())) == (
        "test_hang.py, " + sys._getframe().f_code.co_name,
        False,
    )
    lines = [("/x/distributed_c10d.py", "all_reduce"), ("/x/lowprec_train/comm/axis.py", "reduce_scatter")]
    assert hang.doing(lines) == ("the reduce-scatter of gradients", True)
    lines[1] = (f"{hang.PACKAGE}/comm/new.py", "exchange")
    assert hang.doing(lines) == ("all_reduce of comm/new.py, exchange", True)
    lines = [("/x/lowprec_train/comm/process_group.py", "all_gather_each")]
    assert hang.doing([*lines, ("/x/lowprec_train/model/rows.py", "backward")])[0].startswith("the exchange of act")
    assert hang.doing([*lines, ("/x/lowprec_train/parallel/in_place_all_gather.py", "__call__")]) == (
        "the all-gather of weights",
        True,
    )


def test_errors_of_lost_peers():
    assert hang.of_peers(RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"))
    assert hang.of_peers(dist.DistBackendError("NCCL communicator was aborted"))
    assert not hang.of_peers(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not hang.of_peers(ValueError("no /gloo/ here"))
    assert not hang.of_peers(RuntimeError("checkpoint of step 3 could not be written to runs/nccl-gloo: no space left"))


def test_the_recorder_is_on_where_nobody_has_said_otherwise(monkeypatch, tmp_path):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "mine")
    flight.switch_on(tmp_path / "rank_")
    assert [os.environ.get(name) for name in names] == ["7", None, "1"]
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    flight.switch_on(tmp_path / "rank_")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "rank_")
    assert os.environ.pop("TORCH_FR_DUMP_TEMP_FILE")


def test_the_recorder_listens_to_these_names():
    """A variable that torch has renamed would be set in vain."""
    names = re.findall(r"TORCH_\w+", Path(flight.__file__).read_text())
    torch_directory = TORCH.parent
    files = [
        *torch_directory.glob("include/torch/csrc/distributed/c10d/*.hpp"),
        *torch_directory.glob("lib/libtorch_cpu.*"),
    ]
    found = set()
    for file in files:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found |= {name for name in names if content.find(name.encode()) >= 0}
    assert len(set(names)) == 5 and found == set(names)
