"""What every test can count on: the same threads and draws each time, and GPU tests only where there is a GPU."""

import os

import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, saying why, on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same global generator: a test never depends on which ran before it."""
    torch.manual_seed(0)
