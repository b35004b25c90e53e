"""results.json: the results of a study's finished runs, a few kilobytes per run.

Parts of a study can be trained on different machines. `lowprec study run` writes results.json as each run finishes, and
`lowprec study report STUDY --results FILE ...` combines these files with the runs of its own folder. Each stored run
has a digest of its training configuration, so a run with another configuration is refused. A forked run also has the
digest of the checkpoint that it started from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train import json_schema
from lowprec_train.config import read_object
from lowprec_train.json_schema import FINITE, NUMBER, OBJECT, TEXT, WHOLE, Kind, Listed, Schema
from lowprec_train.tools.compare.report import strict
from lowprec_train.tools.compare.runs import Series
from lowprec_train.tools.study import forking
from lowprec_train.tools.study.plan import StudyRun, saved_form
from lowprec_train.tools.study.results import Result
from lowprec_train.tools.study.rms_spikes import RmsSpikes
from lowprec_train.train.identity import training_keys

FILE = "results.json"
FACTS = ("corpus_hash", "valid_unigram_entropy", "device", "versions", "held_out")
NUMBERS = tuple(
    each.name for each in fields(Result) if each.name not in ("run", "rms_spikes", "valid", "facts", "start_state")
)
NON_FINITE = ("nan", "inf", "-inf")  # as `strict` writes these numbers


def _is_held_out(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(each is None or WHOLE.holds(each) for each in value)


NULL = Kind("null", lambda value: value is None)
COUNT = Kind("a whole number of 0 or more", lambda value: WHOLE.holds(value) and value >= 0)
SIZE = Kind("a whole number above 0", lambda value: WHOLE.holds(value) and value > 0)
LOSS = Kind("a number", lambda value: NUMBER.holds(value) or value in NON_FINITE)
LOSS_OR_NULL = Kind("a number or null", LOSS.holds, null=True)
RMS_SPIKES = {**dict.fromkeys(("events", "spikes", "preceded"), COUNT), "chance": FINITE}
SCHEMA: dict[str, Schema] = {
    "configuration": TEXT,
    **dict.fromkeys(("loss", "weights", "tail", "start"), LOSS),
    **dict.fromkeys(("sharpness", "clipped", "rate"), LOSS_OR_NULL),
    "unstable": TEXT,
    **dict.fromkeys(("logged", "spikes"), COUNT),
    "skipped": WHOLE,
    **dict.fromkeys(("steps", "tokens", "parameters"), SIZE),
    "rms_spikes": lambda value: NULL if value is None else RMS_SPIKES,
    "valid": {"steps": Listed(COUNT), "values": Listed(LOSS)},
    "facts": {
        "corpus_hash": TEXT,
        "valid_unigram_entropy?": FINITE,
        "device?": TEXT,
        "versions?": OBJECT,
        "held_out?": Kind("two whole numbers, or null for one that is not known", _is_held_out),
    },
    "start_state": Kind(forking.START, forking.is_start_state),
}


def configuration_digest(run: StudyRun) -> str:
    """SHA-256 of a run's training keys. Paths of text are excluded; the corpus hash identifies the text."""
    keys = training_keys(saved_form(run, Path()))
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


def to_json(study: str, found: Iterable[Result], kept: Mapping[str, Any] | None = None) -> str:
    """Content of results.json. kept: other stored runs by name, which stay as they are."""
    runs = {**(kept or {}), **{each.run.name: _stored(each) for each in found}}
    return json.dumps(strict({"study": study, "runs": runs}), indent=1, allow_nan=False) + "\n"


def _stored(result: Result) -> dict[str, Any]:
    kept = {name: getattr(result, name) for name in NUMBERS}
    return kept | {
        "rms_spikes": None if result.rms_spikes is None else asdict(result.rms_spikes),
        "valid": {"steps": result.valid.steps.tolist(), "values": result.valid.values.tolist()},
        "facts": {name: result.facts[name] for name in FACTS if name in result.facts},
        "configuration": configuration_digest(result.run),
        "start_state": dict(result.start_state),
    }


def stored_runs(file: Path, study: str) -> dict[str, Any]:
    """Return the runs of a results.json file by name, as stored; empty if there is no such file.

    Raises ValueError, with the file, if it cannot be read, is of another study or has no runs.
    """
    if not file.exists():
        return {}
    content = read_object(file)
    if content.get("study") != study:
        raise ValueError(f"{file}: not the results of study {study}, but of {content.get('study')!r}")
    if wrong := json_schema.fault(content, {"runs": OBJECT}):
        raise ValueError(f"{file}: {wrong}")
    return dict(content["runs"])


def read(files: Sequence[Path], planned: Sequence[StudyRun], study: str) -> list[Result]:
    """Read the results of the planned runs from results.json files.

    Raises ValueError for a file of another study, for a run with another configuration or with a missing or wrong
    field, and if two files have different results of one run.
    """
    named = {run.name: run for run in planned}
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"--results {file}: no such file")
        for name, stored in stored_runs(file, study).items():
            if name not in named:
                continue
            if wrong := fault(stored):
                raise ValueError(f"{file}: {name}: {wrong}")
            if name in found and not _same(found[name][1], stored):
                raise ValueError(f"{file} and {found[name][0]} hold different results of {name}: give one of them")
            if name not in found or "held_out" in stored["facts"]:
                found[name] = file, stored
    return [_result(named[name], file, stored) for name, (file, stored) in found.items()]


def fault(stored: Any) -> str:
    """Return what is missing or wrong in a stored run, with its place; "" for nothing."""
    if found := json_schema.fault(stored, SCHEMA):
        return found
    steps, values = stored["valid"]["steps"], stored["valid"]["values"]
    if len(steps) != len(values):
        return f"valid.steps has length {len(steps)}, and valid.values {len(values)}"
    after = next((at for at, (last, step) in enumerate(pairwise(steps), 1) if step <= last), None)
    return "" if after is None else f"valid.steps[{after}] is {steps[after]}, not above {steps[after - 1]}"


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two stored results are equal, except that one may be of before `held_out` was stored."""
    kept = [each["facts"] for each in (one, other)]
    if not all("held_out" in facts for facts in kept):
        kept = [{key: value for key, value in facts.items() if key != "held_out"} for facts in kept]
    return {**one, "facts": kept[0]} == {**other, "facts": kept[1]}


def _result(run: StudyRun, file: Path, stored: Mapping[str, Any]) -> Result:
    if stored["configuration"] != configuration_digest(run):
        raise ValueError(
            f"{file}: {run.name} was trained with another configuration than this study plans; "
            "give the --set of the command that trained it"
        )
    spikes, valid = stored["rms_spikes"], stored["valid"]
    return Result(
        run=run,
        valid=Series(steps=np.array(valid["steps"], np.int64), values=np.array(valid["values"], np.float64)),
        facts=stored["facts"],
        start_state=stored["start_state"],
        rms_spikes=None if spikes is None else RmsSpikes(**{name: spikes[name] for name in RMS_SPIKES}),
        **{name: _number(stored[name]) for name in NUMBERS},
    )


def _number(value: Any) -> Any:
    """A stored value; non-finite numbers are stored as strings."""
    return float(value) if value in NON_FINITE else value
