"""Converting a model of 1.35 B parameters takes the memory that docs/huggingface.md states."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import huggingface_memory

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", huggingface_memory.DTYPES)
def test_memory_of_a_conversion(tmp_path, dtype):
    """12 GB of disk in FP32, and as much memory for the process that makes the checkpoint."""
    command = [sys.executable, huggingface_memory.__file__, str(tmp_path), "llama_1b3", dtype]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == pytest.approx(2 * 1.345e9, rel=0.01)
    text = (ROOT / "docs" / "huggingface.md").read_text()
    (stated,) = re.findall(rf"^\| {dtype.upper()}, .* \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GB \|$", text, re.M)
    measured = [found[name] for name in ("model", "export", "import")]
    assert measured == pytest.approx([1e9 * float(each) for each in stated], rel=0.1)
