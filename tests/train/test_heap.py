"""What is freed in a run on the CPU goes back to the system."""

import subprocess
import sys

import pytest
import torch

from lowprec_train.train import heap
from lowprec_train.train.heap import HeapTrim, release

PROGRAM = """
import sys, torch
from lowprec_train.train.heap import HeapTrim

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

trim = HeapTrim(torch.device(sys.argv[1]), growth=8 << 20)
torch.empty(30 << 20, dtype=torch.uint8).zero_()  # from here on glibc serves such sizes from the heap
base, kept, most = resident(), [], 0.0
for step in range(60):
    large = [torch.ones(1 + size % 7, 1 << 20, dtype=torch.uint8) for size in range(step, step + 20)]
    kept.append(torch.ones(64))  # lies behind them and keeps the heap's end where it is
    del large
    trim(step)
    most = max(most, resident() - base)
print(most)
"""


def growth(device):
    """MiB that 60 steps add, each of which uses 80 MiB and frees them."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout)


@pytest.mark.skipif(release() is None, reason="another C library than glibc")
def test_freed_tensors_go_back_to_the_system():
    assert growth("cpu") < 10 < growth("meta")


def test_memory_is_given_back_when_the_process_has_grown(monkeypatch):
    released, sizes = [], iter((50, 40, 60, 141, 45, 100))
    monkeypatch.setattr(heap, "resident", lambda: next(sizes))
    monkeypatch.setattr(heap, "release", lambda: released.append)
    trim = HeapTrim(torch.device("cpu"), growth=50)
    for step in range(3):  # of 50 it keeps 40; at 60 it waits; of 141 it keeps 45
        trim(step)
    assert released == [0, 0] and trim._least == 45
