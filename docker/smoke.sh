#!/usr/bin/env bash
# Does this machine train in low precision? What is installed, TransformerEngine and NVIDIA's apex at work, our kernels
# against their reference, then 20 steps under fp8 and under fp4, whose losses have to fall. About two minutes on a GPU.
#
#   docker/smoke.sh                      in the image of docker/Dockerfile
#   docker/smoke.sh --without te,apex    on a GPU elsewhere
#   docker/smoke.sh --cpu                the same commands without a GPU; TransformerEngine and apex are not asked for
#   docker/smoke.sh ... KEY=VALUE ...    overrides of both runs, e.g. model=gpt_tiny steps=5
# The first thing that fails ends it. Runs and tokenised text go to a temporary directory.
set -euo pipefail
cd "$(dirname "$0")/.."

device=cuda without="" overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --cpu) device=cpu without=te,apex ;;
        --without) without=${2:?--without te, apex or te,apex} && shift ;;
        *=*) overrides+=("$1") ;;
        *) echo "docker/smoke.sh: what is $1? See the head of this file." >&2; exit 2 ;;
    esac
    shift
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

stage() { printf '\n=== %s (%ds) ===\n' "$1" "$SECONDS"; }
asked_for() { [[ ,$without, != *,$1,* ]]; }

stage "imports"
python - "$device" <<'PYTHON'
import platform
import sys

import torch

import lowprec_train

print(f"lowprec_train {lowprec_train.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
if sys.argv[1] == "cuda":
    assert torch.cuda.is_available(), "torch sees no GPU: docker run --gpus all, or docker/smoke.sh --cpu"
    print(torch.cuda.get_device_name(), "compute capability", *torch.cuda.get_device_capability(), "CUDA", torch.version.cuda)
PYTHON

if asked_for te; then
    stage "TransformerEngine"
    python - <<'PYTHON'
import torch
import transformer_engine
import transformer_engine.pytorch as te

layer = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight))
print("TransformerEngine", transformer_engine.__version__, "multiplies as torch does")
PYTHON
fi

if asked_for apex; then
    stage "apex"
    python - <<'PYTHON'
import torch
from apex.optimizers import FusedAdam  # NVIDIA's; the package index has an unrelated project of this name

theirs, ours = (torch.nn.Parameter(torch.linspace(-1, 1, 1000, device="cuda")) for _ in range(2))
theirs.grad, ours.grad = (torch.linspace(1, 2, 1000, device="cuda") for _ in range(2))
FusedAdam([theirs], lr=1e-2, weight_decay=0.1).step()
torch.optim.AdamW([ours], lr=1e-2, weight_decay=0.1).step()
torch.testing.assert_close(theirs, ours)
print("apex steps as torch does")
PYTHON
fi

stage "kernels"
python - "$device" <<'PYTHON'
import sys
from collections import Counter

import torch

from lowprec_train.ops import library
from lowprec_train.ops.self_test import self_test

device = torch.device(sys.argv[1])
self_test(device)
print("ops by kernel:", *(f"{kernel} {count}" for kernel, count in Counter(library.live_kernels(device).values()).items()))
PYTHON

for recipe in fp8 fp4; do
    stage "$recipe"
    torchrun --standalone --nproc-per-node=1 train.py "+recipe=$recipe" "name=$recipe" "run_root=$scratch/runs" "device=$device" \
        "data.cache=$scratch/cache" steps=20 eval_interval=1000 checkpoint_interval=1000 "${overrides[@]}" >"$scratch/$recipe.log" 2>&1 ||
        { cat "$scratch/$recipe.log"; exit 1; }
    python - "$scratch/runs/$recipe" <<'PYTHON'
import json
import sys
from collections import Counter
from pathlib import Path

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [line["train/loss"] for line in lines if "train/loss" in line]
layers = json.loads((run / "recipe.json").read_text()).values()
paths = Counter(path for layer in layers for path in layer["execution"].values())
assert (run / "DONE").exists() and losses[-1] < losses[0], losses
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; GEMMs by path:", *(f"{p} {n}" for p, n in paths.items()))
PYTHON
done

stage "this machine trains"
