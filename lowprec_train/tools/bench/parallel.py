"""`lowprec bench parallel`: training steps on several GPUs by recipe and layout, interleaved, under torchrun.

Contestants (`sharded.py`) take turns as those of `lowprec bench step` do, one step each, all ranks together; a step
takes as long as on the slowest rank, and its memory is the largest of all ranks. A contestant that fails on every rank
is a row with its error; where one rank fails alone the others wait, and the timeout ends the run.

`exposed` and `idle` come from a profile of rank 0 (`timeline.py`), whose recording slows the host a little: what a step
of the table waits for is at most that. The limit of a recipe is its contestant `alone`, which sends nothing and whose
optimizer updates every parameter: its time, less that of the updates which other ranks would have made.
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
from lowprec_train.tools.bench.turns import Here
from lowprec_train.train import launch
from lowprec_train.train.launch import World

Row = dict[str, Any]


class Together:
    """A contestant whose parts on all ranks take a step together. Raises the first rank's error on all of them."""

    def __init__(self, contestant: Entrant, work: Work, warm_up: int) -> None:
        assert isinstance(contestant, Sharded)
        made: list[Here] = []
        launch.every(lambda: made.append(Here(contestant, work, warm_up)))
        (self._here,) = made
        found = launch.every(lambda: self._here.facts)
        self.facts = found[0] | launch.first(lambda: contestant.facts(work))
        for name in ("peak_gib", "resident_gib"):
            if name in self.facts:
                self.facts[name] = max(each[name] for each in found)

    def turn(self) -> tuple[float, int]:
        dist.barrier()
        turns = launch.every(self._here.turn)
        return max(ms for ms, _ in turns), max(allocations for _, allocations in turns)

    def profile(self) -> dict[str, Any]:
        return launch.every(self._here.profile)[0]

    def close(self) -> None:
        self._here.close()


def contestants(arms: Sequence[str], peers: Sequence[str], world: World) -> list[Entrant]:
    """The BF16 baseline first: plain FSDP2 where it is asked for. Raises ValueError for what does not parse."""
    found: list[Entrant] = [*chosen_peers(peers), *(Arm.parse(text).contestant(world) for text in arms)]
    first = next((each for each in found if each.baseline), Arm(recipe="bf16").contestant(world))
    return [first, *(each for each in found if each is not first)]


def measure(
    found: Sequence[Entrant], work: Work, world: World, *, resident: int | None = None, **how: Any
) -> dict[str, Any]:
    """As `step.measure`, called on every rank; rows have `estimated_gib` and `sent_gb` of our runs, and `exposed_ms`,
    `idle_ms` and `of_limit` where there is a profile, or the recipe's contestant alone.
    """
    if resident is None:
        resident = fitting(work, world.processes)
    result = step.measure(found, work, resident=resident, ready=Together, **how)
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
    """How many sharded models live on a device together."""
    if work.device.type != "cuda":
        return groups.LARGEST
    need, (free, _) = groups.memory(work.sizes, work), torch.cuda.mem_get_info(work.device)
    sharded = groups.Memory(resident=-(-need.resident // processes), step=need.step)
    return sharded.fits(int(step.MEMORY_SHARE * free))


def limit(row: Row, profiles: dict[str, Any], processes: int) -> float | None:
    """Milliseconds of a step that sends nothing, with this GPU's share of the updates; None but for one `alone`."""
    watched = profiles.get(row["name"])
    if not row["name"].endswith(" alone") or "ms" not in row or watched is None:
        return None
    return float(row["ms"] - watched["ms"].get("optimizer", 0.0) * (1 - 1 / processes))


def _watched(profile: dict[str, Any] | None) -> Row:
    return {} if profile is None else {key: profile[key] for key in ("exposed_ms", "idle_ms") if key in profile}
