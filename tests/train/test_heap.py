"""What is freed in a run on the CPU goes back to the system."""

import subprocess
import sys

import pytest
import torch

from lowprec_train.train.heap import HeapTrim, release

PROGRAM = """
import sys, torch
from lowprec_train.train.heap import HeapTrim

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

trim = HeapTrim(torch.device(sys.argv[1]), seconds=0.0)
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
    assert growth("cpu") < 10 < 40 < growth("meta")


def test_releases_are_seconds_apart():
    released = []
    trim = HeapTrim(torch.device("cpu"), seconds=1000.0)
    trim._release = released.append
    for step in range(5):
        trim(step)
    assert released == []
    trim._last -= 1001
    trim(5)
    trim(6)
    assert released == [0]
