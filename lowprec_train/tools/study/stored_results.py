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
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.config import read_object
from lowprec_train.tools.compare.report import strict
from lowprec_train.tools.compare.runs import Series
from lowprec_train.tools.study.plan import StudyRun, saved_form
from lowprec_train.tools.study.results import Result
from lowprec_train.tools.study.rms_spikes import RmsSpikes
from lowprec_train.train.identity import training_keys

FILE = "results.json"
FACTS = ("corpus_hash", "valid_unigram_entropy", "device", "versions", "held_out")
NUMBERS = tuple(each.name for each in fields(Result) if each.name not in ("run", "valid", "facts", "start_state"))


def configuration_digest(run: StudyRun) -> str:
    """SHA-256 of a run's training keys. Paths of text are excluded; the corpus hash identifies the text."""
    keys = training_keys(saved_form(run, Path()))
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()


def to_json(study: str, found: Iterable[Result]) -> str:
    """Content of results.json."""
    runs = {each.run.name: _stored(each) for each in found}
    return json.dumps(strict({"study": study, "runs": runs}), indent=1, allow_nan=False) + "\n"


def _stored(result: Result) -> dict[str, Any]:
    kept = {name: getattr(result, name) for name in NUMBERS if name != "rms_spikes"}
    return kept | {
        "rms_spikes": None if result.rms_spikes is None else asdict(result.rms_spikes),
        "valid": {"steps": result.valid.steps.tolist(), "values": result.valid.values.tolist()},
        "facts": {name: result.facts[name] for name in FACTS if name in result.facts},
        "configuration": configuration_digest(result.run),
        "start_state": dict(result.start_state),
    }


def read(files: Sequence[Path], planned: Sequence[StudyRun], study: str) -> list[Result]:
    """Read the results of the planned runs from results.json files.

    Raises ValueError for a file of another study, for a run with another configuration, and if two files have different
    results of one run.
    """
    named = {run.name: run for run in planned}
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"--results {file}: no such file")
        content = read_object(file)
        if content.get("study") != study or not isinstance(content.get("runs"), dict):
            raise ValueError(f"--results {file}: not the results of study {study}, but of {content.get('study')!r}")
        for name, stored in content["runs"].items():
            if name not in named:
                continue
            if name in found and not _same(found[name][1], stored):
                raise ValueError(f"{file} and {found[name][0]} hold different results of {name}: give one of them")
            if name not in found or "held_out" in _facts(stored):
                found[name] = file, stored
    return [_result(named[name], file, stored) for name, (file, stored) in found.items()]


def _facts(stored: Mapping[str, Any]) -> dict[str, Any]:
    return facts if isinstance(facts := stored.get("facts"), dict) else {}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two stored results are equal, except that one may be of before `held_out` was stored."""
    kept = [_facts(each) for each in (one, other)]
    if not all("held_out" in facts for facts in kept):
        kept = [{key: value for key, value in facts.items() if key != "held_out"} for facts in kept]
    return {**one, "facts": kept[0]} == {**other, "facts": kept[1]}


def _result(run: StudyRun, file: Path, stored: Mapping[str, Any]) -> Result:
    if stored.get("configuration") != configuration_digest(run):
        raise ValueError(
            f"{file}: {run.name} was trained with another configuration than this study plans; "
            "give the --set of the command that trained it"
        )
    try:
        numbers = {name: _number(stored[name]) for name in NUMBERS if name != "rms_spikes"}
        spikes = stored["rms_spikes"]
        valid = Series(
            steps=np.array(stored["valid"]["steps"], np.int64), values=np.array(stored["valid"]["values"], np.float64)
        )
        return Result(
            run=run,
            valid=valid,
            facts=stored["facts"],
            start_state=stored["start_state"],
            rms_spikes=None if spikes is None else RmsSpikes(**spikes),
            **numbers,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {run.name}: {type(error).__name__}: {error}") from None


def _number(value: Any) -> Any:
    """A stored value; non-finite numbers are stored as strings."""
    return float(value) if value in ("nan", "inf", "-inf") else value
