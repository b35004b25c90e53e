"""`lowprec bench step`: training steps of this package's recipes and of peer libraries, interleaved.

The contestants of a group (`groups.py`) are built and warmed up one after another, which measures the memory of each.
Then each contestant runs one step per round. A contestant that fails gets a row with its error; the others continue. A
contestant that is `apart` runs in a child process (`turns.py`).
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowprec_train.tools.bench import groups, turns
from lowprec_train.tools.bench.contestant import Contestant, Entrant, Work
from lowprec_train.tools.bench.result import cause
from lowprec_train.tools.bench.turns import Ready, Turn, Turns, error_line
from lowprec_train.train.garbage import collected_every

Row = dict[str, Any]
Say = Callable[[str], None]
MEMORY_SHARE = 0.9  # usable fraction of the free memory; the rest is for fragmentation and libraries


def measure(
    contestants: Sequence[Entrant],
    work: Work,
    *,
    largest: int = groups.LARGEST,
    resident: int | None = None,
    warm_up: int = 4,
    rounds: int = 8,
    profiled: Sequence[str] = (),
    ready: Ready = turns.ready,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure all contestants. Returns `rows`, one per contestant and group, and `profiles` by name.

    largest: contestants per group. resident: models in memory at once, None: as many as fit. profiled: contestants
    whose name contains one of these strings are profiled. ready: builds and warms up a contestant.
    """
    if resident is None:
        resident = fitting(work)
    rows: list[Row] = []
    profiles: dict[str, Any] = {}
    present = [each for each in contestants if not each.missing]
    together = largest if resident == 1 else min(largest, resident)
    for index, group in enumerate(groups.plan(present, max(2, together))):
        batches = [group] if resident > 1 else [[each] for each in group]
        for batch in batches:
            measured, looked_at = _together(batch, work, warm_up, rounds, profiled, ready, say)
            rows += [{"group": index} | row for row in measured]
            profiles = looked_at | profiles
    rows += [
        {"name": each.name, "baseline": each.baseline, "error": each.missing} for each in contestants if each.missing
    ]
    about = {"sizes": work.sizes, "tokens_per_step": work.tokens, "interleaved": resident > 1}
    return about | {"rows": rates(rows, work.tokens), "profiles": profiles}


def profile_filters(parts: Sequence[str], contestants: Sequence[str]) -> list[str]:
    """Return parts of names, "" for `all`. Raises ValueError for an empty part, and for one that no name contains."""
    for part in parts:
        if part != "all" and not (part and any(part in name for name in contestants)):
            raise ValueError(
                f"--profile {part!r}: no contestant has it in its name; there are {', '.join(contestants)}"
            )
    return ["" if part == "all" else part for part in parts]


def fitting(work: Work) -> int:
    """Number of models that fit the device's memory at once."""
    if work.device.type != "cuda":
        return groups.LARGEST
    free, _ = torch.cuda.mem_get_info(work.device)
    return groups.memory(work.sizes, work).fits(int(MEMORY_SHARE * free))


def _together(
    group: Sequence[Entrant],
    work: Work,
    warm_up: int,
    rounds: int,
    profiled: Sequence[str],
    ready: Ready,
    say: Say,
) -> tuple[list[Row], dict[str, Any]]:
    """Measure contestants that are in memory at the same time. Returns their rows and the requested profiles."""
    rows: dict[str, Row] = {each.name: {"name": each.name, "baseline": each.baseline} for each in group}
    taking: dict[str, Turns] = {}
    for contestant in group:
        row, begin = rows[contestant.name], time.perf_counter()
        try:
            taking[contestant.name] = ready(contestant, work, warm_up - 1)
            row |= taking[contestant.name].facts
        except Exception as error:
            row["error"] = error_line(error)
            say(traceback.format_exc())
        row["ready_s"] = time.perf_counter() - begin
        say(f"{contestant.name}: {row.get('error', 'ready')} after {row['ready_s']:.0f} s")
        _collect(work)
    try:
        with collected_every(rounds + 2):  # never within the rounds and profiles
            for name, each in _rounds(taking, rows, rounds).items():
                rows[name] |= _summary(each)
                say(f"{name}: {rows[name]['ms']:.1f} ms, median of {len(each)} steps")  # what an early end leaves
            launched = [each.name for each in group if each.name in taking and not each.recorded]
            selected = [name for name in launched if any(part in name for part in profiled)]
            profiles = {name: taking[name].profile() for name in selected}
    finally:
        while taking:
            taking.popitem()[1].close()  # no name keeps the last one
    torch.compiler.reset()
    _collect(work)
    return list(rows.values()), profiles


def _rounds(ready: dict[str, Turns], rows: dict[str, Row], rounds: int) -> dict[str, list[Turn]]:
    """The turns of each contestant, after one untimed round. A contestant that fails is removed."""
    taken: dict[str, list[Turn]] = {name: [] for name in ready}
    for number in range(rounds + 1):
        for name in list(ready):
            try:
                one = ready[name].turn()
            except Exception as error:
                rows[name]["error"] = error_line(error)
                ready.pop(name).close()
                del taken[name]
                continue
            if number:
                taken[name].append(one)
    return taken


def _summary(taken: Sequence[Turn]) -> Row:
    """Return what a row says of its timed steps. host_ms, cpu_ms: the median of each process."""
    times = [each.ms for each in taken]
    processes = {"host_ms": [each.host_ms for each in taken], "cpu_ms": [each.cpu_ms for each in taken]}
    medians = {name: [*map(statistics.median, zip(*each, strict=True))] for name, each in processes.items()}
    allocations = sum(each.allocations for each in taken)  # within timed steps they are slow
    return {"ms": statistics.median(times), "times_ms": times, "device_allocations": allocations, **medians}


def _collect(work: Work) -> None:
    gc.collect()
    if work.device.type == "cuda":
        torch.cuda.empty_cache()


def rates(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Add tokens per second and speed-ups to the rows.

    of_group: speed relative to the BF16 baseline of the same group. of_fastest: of_group divided by that of the fastest
    BF16 contestant.
    """
    beside: dict[int, float] = {}
    for row in rows:
        if row["baseline"] and "ms" in row:
            beside.setdefault(row["group"], row["ms"])
    rated = [dict(row) for row in rows]
    timed = [row for row in rated if "ms" in row]
    for row in timed:
        row["tokens_per_s"] = tokens / row["ms"] * 1e3
        if row["group"] in beside:
            row["of_group"] = beside[row["group"]] / row["ms"]
    fastest = max((row["of_group"] for row in timed if row["baseline"] and "of_group" in row), default=None)
    for row in timed:
        if fastest and "of_group" in row:
            row["of_fastest"] = row["of_group"] / fastest
    return rated


def dry_run(contestants: Sequence[Contestant], work: Work, *, largest: int = groups.LARGEST) -> dict[str, Any]:
    """Build every model on the meta device. Returns its number of parameters or its error, and the groups."""
    on_meta = replace(work, device=torch.device("meta"), compiled=False)
    rows: list[Row] = []
    for contestant in contestants:
        row: Row = {"name": contestant.name, "baseline": contestant.baseline}
        try:
            if contestant.missing:
                row["error"] = contestant.missing
            else:
                row["parameters"] = sum(p.numel() for p in contestant.build(on_meta).module.parameters())
        except Exception as error:
            row |= {"error": cause(error), "failed": True}
        rows.append(row)
    need = groups.memory(work.sizes, work)
    present = [each for each in contestants if not each.missing]
    return {
        "sizes": work.sizes,
        "tokens_per_step": work.tokens,
        "groups": [[each.name for each in group] for group in groups.plan(present, largest)],
        "resident_gib": need.resident / 2**30,
        "step_gib": need.step / 2**30,
        "rows": rows,
    }
