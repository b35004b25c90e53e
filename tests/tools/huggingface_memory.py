"""What converting a model costs in memory: each command in a process of its own, whose largest size is reported.

Usage: huggingface_memory.py DIRECTORY [MODEL] [bf16|fp32]. Saves a checkpoint of MODEL (llama_1b3) with weights in that
dtype (fp32), exports it in BF16, imports that, and prints a line of JSON: bytes of the exported model, and bytes by
which each command's resident memory peaked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def save(directory: Path, model: str, dtype: str) -> None:
    """Noise of the model's sizes, all tensors."""
    import torch

    from lowprec_train.model.transformer import Transformer
    from lowprec_train.train.weights import architecture, shapes
    from tests.recipes import composed
    from tests.tools.exchanged import save_run

    sizes = composed(f"model={model}").model
    with torch.device("meta"):
        made = Transformer(architecture(sizes))
    made = made.to(getattr(torch, DTYPES[dtype])).to_empty(device="cpu")
    assert [name for name, _ in made.named_parameters()] == list(shapes(sizes))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-1, 1)
    save_run(directory / "run", made, sizes, tokenizer=None)


def peak(*arguments: str) -> int:
    """Bytes at the most, of a process that runs one `lowprec` command: VmHWM, since ru_maxrss outlives exec."""
    code = (
        "import sys; from pathlib import Path; from lowprec_train.tools.cli import main; status = main(sys.argv[1:]); "
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


def measured(directory: Path) -> dict[str, int]:
    """Of a run in DIRECTORY/run."""
    out, back = str(directory / "out"), str(directory / "in")
    peaks = {
        "export": peak("export-hf", str(directory / "run"), "--out", out, "--dtype", "bf16"),
        "import": peak("import-hf", out, "--out", back),
    }
    return {"model": sum(file.stat().st_size for file in Path(out).glob("*.safetensors")), **peaks}


if __name__ == "__main__":
    place, *others = sys.argv[1:]
    save(Path(place), *(others + ["llama_1b3", "fp32"][len(others) :]))
    print(json.dumps(measured(Path(place))))
