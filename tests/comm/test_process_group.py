"""Rows between two processes, over gloo and NCCL: the values and gradients of threads that add in rank order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.comm.group_processes import CODES, DTYPES, RANKS, passes, rows, spoilt
from tests.groups import among

ROOT = Path(__file__).parents[2]


def launch(directory, *arguments):
    """What each rank saved."""
    command = [sys.executable, str(Path(__file__).with_name("group_processes.py")), str(directory), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [torch.load(path) for path in sorted(Path(directory).glob("rank-*.pt"))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def saved_on_gpus(tmp_path_factory):
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} CUDA devices")
    return launch(tmp_path_factory.mktemp("gpus"), "nccl")


def assert_said(saved):
    """Places, gathered values of every dtype, maxima."""
    want = torch.stack([spoilt(rank).nan_to_num(torch.inf, torch.inf, -torch.inf) for rank in range(RANKS)]).amax(0)
    for rank, each in enumerate(saved):
        assert each["place"] == (RANKS, rank)
        assert torch.equal(each["largest"], want)
        for dtype in CODES:
            whole = [rows(rank, torch.float32).mul(8).to(dtype) for rank in range(RANKS)]
            for dim, gathered in enumerate(each["gather", dtype]):
                assert gathered.dtype is dtype and torch.equal(gathered.float(), torch.cat(whole, dim).float())


def test_gathered_rows_and_maxima(saved):
    assert_said(saved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_values_and_gradients_are_those_of_threads(saved, how, dtype):
    """Bit for bit: sums are FP32, in rank order, rounded once."""
    expected = among(RANKS, lambda group: passes(group.rank, dtype, group, "cpu"))
    for each, want in zip(saved, expected):
        for got, wanted in zip(each[how, dtype], want):
            assert got.dtype is wanted.dtype and torch.equal(got, wanted)


@pytest.mark.gpu
def test_over_nccl(saved_on_gpus):
    assert_said(saved_on_gpus)
    for dtype in DTYPES:
        error = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        expected = among(RANKS, lambda group, dtype=dtype: passes(group.rank, dtype, group, "cpu"))
        for each, want in zip(saved_on_gpus, expected):
            for how in ("eager", "compiled"):
                for got, wanted in zip(each[how, dtype], want):
                    assert (got - wanted).float().norm() <= error * wanted.float().norm()
