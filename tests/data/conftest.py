"""Small corpora for the data tests, and the standard library tokenised once by two processes that race for it."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lowprec_train.data.indexed import IndexedDataset
from tests.data.indexed_files import write_indexed
from tests.data.prepared import place, root  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[2]
FIRST_USE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from lowprec_train.data.corpus import stdlib
print("ready", flush=True)
sys.stdin.readline()
corpus = stdlib(seq_len=256, cache=sys.argv[1])
print("hash", corpus.hash)
"""


@dataclass(frozen=True)
class FirstUse:
    """What two processes said that asked for the standard library at the same moment."""

    cache: str
    outputs: tuple[str, ...]


@pytest.fixture(scope="session")
def first_use(tmp_path_factory) -> FirstUse:
    cache = str(tmp_path_factory.mktemp("cache"))
    command = [sys.executable, "-c", FIRST_USE, cache]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = tuple(process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    return FirstUse(cache, outputs)


@pytest.fixture
def write(tmp_path) -> Callable[..., IndexedDataset]:
    """write(name, documents, dtype): an indexed dataset of these documents, each a list of tokens."""

    def write(name: str, documents: Sequence[Sequence[int]], dtype=np.int32) -> IndexedDataset:
        prefix = tmp_path / name
        write_indexed(prefix, documents, dtype)
        return IndexedDataset(prefix)

    return write
