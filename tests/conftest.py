"""What every test can count on: the same threads and draws each time, and GPU tests only where there is a GPU."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowprec_train
from lowprec_train.data.cache import build_once

os.environ.setdefault("MPLBACKEND", "Agg")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_configure() -> None:
    """Refuse to test another checkout: an editable install is found before the working directory."""
    here, imported = (Path(file).resolve().parents[1] for file in (__file__, lowprec_train.__file__))
    if imported != here:
        raise pytest.UsageError(
            f"the tests of {here} import lowprec_train from {imported}; install this checkout into {sys.prefix} "
            "(make env), or use another environment"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, saying why, on a machine without a CUDA device; mark the first case of every test
    against the oracle as `check`.
    """
    first = {(item.path, getattr(item, "originalname", item.name)): item for item in reversed(items)}
    for item in first.values():
        if "oracle" in item.path.name:
            item.add_marker(pytest.mark.check)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays until the end: the imports and the tests themselves."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same global generator: a test never depends on which ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """(name, make) -> what `make` returns, made by one of pytest's workers and read by the others: for what takes long
    and whose tests may be dealt to several of them.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def result(name: str, make: Callable[[], Any]) -> Any:
        directory = build_once(shared / f"once-{name}", lambda made: torch.save(make(), made / "result.pt"))
        return torch.load(directory / "result.pt", weights_only=False)

    return result
