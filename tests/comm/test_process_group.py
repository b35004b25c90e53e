"""Rows between two processes, over gloo and NCCL: the values and gradients of threads that add in rank order."""

import pytest
import torch

from tests.comm.group_processes import CODES, DTYPES, RANKS, passes, rows, spoilt, work
from tests.distributed import run_distributed
from tests.groups import among


@pytest.fixture(scope="module")
def saved():
    return run_distributed(work, RANKS, "cpu")


@pytest.fixture(scope="module")
def saved_on_gpus():
    return run_distributed(work, RANKS, "cuda", backend="nccl")


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
