"""State of each run of a study, read from its directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from lowprec_train.config import read_object
from lowprec_train.data.appending import write_whole
from lowprec_train.tools.study import evaluation
from lowprec_train.tools.study.plan import StudyRun

SHARED = "shared.json"


class State(Enum):
    """State of a run. A diverged run is finished: it is a result and is not trained again."""

    new = "not begun"
    begun = "begun"
    trained = "trained, not evaluated"
    diverged = "diverged"
    done = "done"

    @property
    def finished(self) -> bool:
        return self in (State.done, State.diverged)

    @property
    def ended(self) -> bool:
        """Whether training has ended; the evaluation may be missing."""
        return self.finished or self is State.trained


def state(run: Path) -> State:
    """Return the state of a run directory. Raises ValueError for a file that cannot be read."""
    if (run / "DIVERGED").exists():
        return State.diverged
    if (run / "DONE").exists():
        return State.done if evaluation.read(run) else State.trained
    return State.begun if (run / "config.yaml").exists() else State.new


def states(planned: Sequence[StudyRun], out: Path) -> dict[str, State]:
    """Return the state of each run by name."""
    return {run.name: state(out / run.name) for run in planned}


def shared(out: Path) -> list[str]:
    """Return the names of runs that shared a device with other runs, so that their speeds are not usable."""
    found = read_object(out / SHARED).get("runs", [])
    if not isinstance(found, list):
        raise ValueError(f"{out / SHARED}: runs is {found!r}, not a list of names")
    return [str(name) for name in found]


def note_shared(out: Path, name: str) -> None:
    """Add a run to shared.json."""
    if name not in (known := shared(out)):
        write_whole(out / SHARED, f"{json.dumps({'runs': [*known, name]}, indent=2)}\n".encode())


def summary(planned: Sequence[StudyRun], out: Path) -> list[str]:
    """Return lines that say how many runs are in each state and which are not finished."""
    found = states(planned, out)
    counts = [f"{list(found.values()).count(each)} {each.value}" for each in reversed(State) if each in found.values()]
    lines = [f"{len(planned)} runs in {out}: {', '.join(counts)}"]
    left = [name for name, each in found.items() if not each.finished]
    if left:
        lines.append(f"not finished: {', '.join(left[:8])}{f' and {len(left) - 8} more' if len(left) > 8 else ''}")
    for purpose, cell in dict.fromkeys((run.purpose, run.cell) for run in planned):
        whole = whole_seeds([run for run in planned if (run.purpose, run.cell) == (purpose, cell)], found)
        of = f"{purpose}, {cell}" if cell else purpose
        lines.append(f"complete blocks, {of}: seeds {', '.join(map(str, whole)) or '(none)'}")
    return lines


def whole_seeds(planned: Sequence[StudyRun], found: dict[str, State]) -> list[int]:
    """Return the seeds for which every run is finished."""
    seeds = dict.fromkeys(run.seed for run in planned)
    return [seed for seed in seeds if all(found[run.name].finished for run in planned if run.seed == seed)]
