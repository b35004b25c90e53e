"""`lowprec bench parallel`: training steps on several GPUs by recipe and layout, interleaved, under torchrun.

Contestants (`sharded.py`) take turns as in `lowprec bench step`, one step each, on all ranks together. The time of a
step is that of the slowest rank, and its memory is the largest of all ranks. A contestant that fails on every rank gets
a row with its error. If a single rank fails, the others wait, and the timeout ends the run.

`exposed` and `idle` come from a profile of rank 0 (`timeline.py`). Recording slows the host a little, so they are upper
bounds for the steps of the table. The limit of a recipe comes from its contestant `alone`, which sends nothing and
updates every parameter: its time minus that of the updates that other ranks would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lowprec_train.tools.bench import groups, step
from lowprec_train.tools.bench.contestant import Entrant, Work
from lowprec_train.tools.bench.sharded import Arm, Sharded
from lowprec_train.tools.bench.sharded import peers as chosen_peers
from lowprec_train.tools.bench.turns import InProcess, Turn
from lowprec_train.train import launch
from lowprec_train.train.launch import World

Row = dict[str, Any]


class OnAllRanks:
    """A contestant that runs its steps on all ranks together. Raises the first rank's error on all ranks."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        assert isinstance(contestant, Sharded)
        facts = launch.first(lambda: contestant.facts(work))  # before it is compiled: the estimate drops all graphs
        made: list[InProcess] = []
        launch.every(lambda: made.append(InProcess(contestant, work, warm_up)))
        (self._here,) = made
        found = launch.every(lambda: self._here.facts)
        self.facts = found[0] | facts
        for name in ("peak_gib", "resident_gib"):
            if name in self.facts:
                self.facts[name] = max(each[name] for each in found)

    def turn(self) -> Turn:
        dist.barrier()
        ms, allocations, host_ms, cpu_ms = zip(*launch.every(self._here.turn), strict=True)
        return Turn(max(ms), max(allocations), sum(host_ms, ()), sum(cpu_ms, ()))

    def profile(self) -> dict[str, Any]:
        return launch.every(self._here.profile)[0]

    def close(self) -> None:
        self._here.close()


def contestants(arms: Sequence[str], peers: Sequence[str], world: World) -> list[Entrant]:
    """Return the contestants, the BF16 baseline first: plain FSDP2 if requested. Raises ValueError for invalid arms."""
    found: list[Entrant] = [*chosen_peers(peers), *(Arm.parse(text).contestant(world) for text in arms)]
    first = next((each for each in found if each.baseline), Arm(recipe="bf16").contestant(world))
    return [first, *(each for each in found if each is not first)]


def measure(
    found: Sequence[Entrant], work: Work, world: World, *, resident: int | None = None, **how: Any
) -> dict[str, Any]:
    """Measure as `step.measure`; all ranks must call it. Rows of our runs also have `estimated_gib` and `sent_gb`; with
    a profile `exposed_ms` and `idle_ms`; with the recipe's contestant `alone`, `of_limit`.
    """
    if resident is None:
        resident = fitting(work, world.processes)
    result = step.measure(found, work, resident=resident, ready=OnAllRanks, **how)
    rows = [row | _watched(result["profiles"].get(row["name"])) for row in result["rows"]]
    limits = {
        name: ms for row in rows if (ms := limit(row, result["profiles"], world.processes)) for name in [row["name"]]
    }
    for row in rows:
        best = limits.get(f"{row['name'].split()[0]} alone")
        if best and "ms" in row:
            row["of_limit"] = best / row["ms"]
    return result | {"rows": rows, "gpus": world.processes}


def fitting(work: Work, processes: int) -> int:
    """Return the number of sharded models that fit a device at once."""
    if work.device.type != "cuda":
        return groups.LARGEST
    need, (free, _) = groups.memory(work.sizes, work), torch.cuda.mem_get_info(work.device)
    sharded = groups.Memory(resident=-(-need.resident // processes), step=need.step)
    return sharded.fits(int(step.MEMORY_SHARE * free))


def limit(row: Row, profiles: dict[str, Any], processes: int) -> float | None:
    """Return the milliseconds of a step without communication and with this GPU's share of the updates; None for a
    contestant that is not `alone`.
    """
    watched = profiles.get(row["name"])
    if not row["name"].endswith(" alone") or "ms" not in row or watched is None:
        return None
    return float(row["ms"] - watched["ms"].get("optimizer", 0.0) * (1 - 1 / processes))


def _watched(profile: dict[str, Any] | None) -> Row:
    return {} if profile is None else {key: profile[key] for key in ("exposed_ms", "idle_ms") if key in profile}
