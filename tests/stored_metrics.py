"""Metrics of every recipe x {llama_tiny, gpt_tiny} over twenty steps, stored before a refactor and compared after it.

    python -m tests.stored_metrics store FILE          # on the commit before
    python -m tests.stored_metrics check FILE          # on each commit after: exit status 1 where a bit differs

`--recipes fp8 fp4`, `--models gpt_tiny`, `--layouts one` take a part. A stored file holds for one machine, one torch
and one set of compiled kernels: matrix products differ between them. It is not committed.

A run is one process, or four (dp 2 x tp 2) over gloo; each is the recipe's whole system: its optimizer, its saved
activations, its gradient communication, clipping on. Stored are all numbers of every step but times, the validation
loss, and a digest of the parameters at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lowprec_train.ops import library
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.launch import ALONE, World
from tests.distributed import run_distributed
from tests.parallel.runs import MICRO, SEQ, SPLIT, TINY, built
from tests.recipes import MODELS, SYSTEMS, composed

STEPS = 20
LAYOUTS = {"one": Sizes(), "dp2-tp2": Sizes(dp_shard=2, tp=2)}
WIDTHS = {  # whose halves are multiples of every tile
    "llama_tiny": SPLIT,
    "gpt_tiny": ("model.dim=256", "model.heads=8", "model.kv_heads=8", "model.ffn=1024"),
}

Runs = dict[str, dict[str, Any]]


def trained(recipe: str, model: str, sizes: Sizes, world: World = ALONE) -> dict[str, Any]:
    """Every number that one run logs. Two micro-batches a step in each data-parallel rank."""
    grid = [f"parallel.dp_shard={sizes.dp_shard}", f"parallel.tp={sizes.tp}"] if world.processes > 1 else []
    tokens = f"tokens_per_step={2 * MICRO * SEQ * sizes.dp}"
    run = composed(f"+recipe={recipe}", f"model={model}", *WIDTHS[model], *TINY, tokens, f"steps={STEPS}", *grid)
    trainer = built(run, world, torch.bfloat16)
    steps = [{key: float(value) for key, value in trainer.step().items() if "time/" not in key} for _ in range(STEPS)]
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(name.encode() + local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {"steps": steps, "valid": trainer.evaluate(), "parameters": digest.hexdigest()}


def work(rank: int, layout: str, names: list[tuple[str, str]]) -> Runs:
    """One process of a layout, all runs one after another."""
    sizes = LAYOUTS[layout]
    world = World(rank, sizes.processes, rank)
    return {f"{recipe} {model}": trained(recipe, model, sizes, world) for recipe, model in names}


def measured(layouts: list[str], names: list[tuple[str, str]]) -> Runs:
    """{layout recipe model, rank}: the numbers of the run."""
    torch.set_num_threads(1)
    found: Runs = {}
    for layout in layouts:
        if LAYOUTS[layout].processes == 1:
            found |= {f"{layout} {recipe} {model}": trained(recipe, model, Sizes()) for recipe, model in names}
            continue
        for rank, runs in enumerate(run_distributed(work, LAYOUTS[layout], layout, names, timeout=7200)):
            found |= {f"{layout} {name} rank {rank}": run for name, run in runs.items()}
    return found


def differences(stored: Runs, found: Runs) -> list[str]:
    """One line for each run that is not the stored one, with the first number that differs."""
    lines = []
    for name, run in found.items():
        before = stored.get(name)
        if before is None:
            lines.append(f"{name}: not stored")
        elif before != run:
            lines.append(f"{name}: {_first_difference(before, run)}")
    return lines


def _first_difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    for step, (old, new) in enumerate(zip(before["steps"], after["steps"], strict=True), start=1):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f"step {step}: {key} was {old.get(key)}, is {new.get(key)}"
    if before["valid"] != after["valid"]:
        return f"validation was {before['valid']}, is {after['valid']}"
    return "the parameters after the last step differ"


def where() -> dict[str, str]:
    """What a stored file holds for."""
    return {"torch": torch.__version__, "kernels": str(sorted(set(library.live_kernels(torch.device("cpu")).values())))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("store", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--recipes", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    asked = parser.parse_args()
    found = measured(asked.layouts, [(recipe, model) for recipe in asked.recipes for model in asked.models])
    if asked.action == "store":
        asked.file.write_text(json.dumps({"where": where(), "runs": found}))
        print(f"{len(found)} runs stored in {asked.file}")
        return
    stored = json.loads(asked.file.read_text())
    if stored["where"] != where():
        sys.exit(f"error: {asked.file} was stored with {stored['where']}, this is {where()}")
    lines = differences(stored["runs"], found)
    print(*lines, f"{len(found) - len(lines)} of {len(found)} runs are bit-identical", sep="\n")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
