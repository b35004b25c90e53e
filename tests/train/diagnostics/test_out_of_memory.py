"""Out of memory is recognised wherever it happens; `tests/test_main_logging.py` has the line that a run prints."""

import subprocess
import sys

import pytest
import torch

from lowprec_train.train.diagnostics.out_of_memory import OutOfMemory, converted, is_out_of_memory
from tests.launches import environment

IN_A_KERNEL = """
import resource
import torch
import lowprec_train.ops.library
from lowprec_train.train.diagnostics.out_of_memory import OutOfMemory, converted
x, seed = torch.zeros(1 << 13, 1 << 13), torch.tensor(5)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (20 << 20),) * 2)
try:
    with converted(x.device):
        torch.ops.lowprec.hadamard(x, seed, 128)
except OutOfMemory as error:
    print(error)
"""


def test_an_output_of_a_compiled_kernel_that_does_not_fit():
    """torch's stable ABI reports a failed call there, whatever the cause was."""
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], env=environment(), capture_output=True, text=True)
    assert done.stdout.startswith("out of memory on the CPU"), (done.stdout, done.stderr[-2000:])


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("cuBLAS_STATUS_ALLOC_FAILED")]
)
def test_torch_and_libraries(error):
    with pytest.raises(OutOfMemory), converted(torch.device("cpu")):
        raise error


def test_other_errors_stay_what_they_are():
    assert not is_out_of_memory(RuntimeError('torch_call_dispatcher( "aten::add", "", stack.data()) API call failed'))
