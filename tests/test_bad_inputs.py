"""Every bad input of tests/bad_inputs ends in one short error that holds the value, and changes no earlier file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.bad_inputs import models, recipes, runs, settings, text, tools, workplace
from tests.launches import ROOT, Command

DAILY = [*settings.NAMES, *settings.TYPES]
NIGHTLY = [*settings.NUMBERS, *settings.FITTING, *recipes.CASES, *runs.CASES, *text.CASES, *models.CASES, *tools.CASES]
CASES = [*DAILY, *NIGHTLY]
GROUPS = (settings.NAMES, settings.TYPES, settings.NUMBERS, settings.FITTING, recipes.CASES, runs.CASES, text.CASES)
SAMPLE = [group[0] for group in (*GROUPS, models.CASES, tools.CASES)]  # one of each kind, by day
STARTED = [settings.NUMBERS[0], runs.CASES[0], tools.CASES[0]]  # in processes of their own by day
FORKED = [*DAILY, *(case for case in SAMPLE if case not in DAILY)]
PROGRAMS = {"train": (ROOT / "train.py",), "lowprec": ("-m", "lowprec_train.tools.cli")}
LINES = 6
LIMIT = 240  # seconds of a command
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_MODE", "HYDRA_FULL_ERROR")


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def forked(arguments, directory, **more):
    """The status of a command and what it wrote, run in a process that costs no imports."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        place = {"directory": directory, "values": {**environment(), **more}}
        status = Command(*arguments, output=output, errors=errors, **place).wait(LIMIT)
        return {"status": status, "out": output.read_text(), "err": errors.read_text()}


@pytest.fixture(scope="session")
def prepared(once, tmp_path_factory):
    """The workplace, made by one of pytest's workers. It stays where it was made: runs name their tokenizer's file."""

    def make():
        directory = tmp_path_factory.mktemp("bad-inputs")
        workplace.write_text(directory)
        for command in workplace.COMMANDS:
            done = forked(command, directory)
            assert done["status"] == 0, (command, done)
        return directory

    return once("bad-inputs", make)


def contents(directory):
    """Every file that stands below, by a hash; locks hold nothing."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def judge(case, done):
    """The faults of an answer to a bad input."""
    lines = [line for line in done["err"].splitlines() if line.strip()]
    faults = [] if done["status"] > 0 else [f"status {done['status']}"]
    faults += [f"{len(lines)} lines"] if not 1 <= len(lines) <= LINES else []
    faults += ["no `error:`"] if sum("error" in line for line in lines[:1]) != 1 else []
    faults += ["a traceback"] if "Traceback" in done["err"] + done["out"] else []
    return faults + [f"does not say {text!r}" for text in case.says if text not in done["err"]]


def in_process(arguments, directory, **more):
    """As `forked`, in a process of its own, as a user starts it."""
    entry, *rest = arguments
    command = [sys.executable, *PROGRAMS[entry], *rest]
    held = {**environment(), "PYTHONPATH": str(ROOT), **more}
    ran = subprocess.run(
        list(map(str, command)), cwd=directory, env=held, capture_output=True, text=True, timeout=LIMIT
    )
    return {"status": ran.returncode, "out": ran.stdout, "err": ran.stderr}


def ways(case):
    """The commands that take a case: both that train, or the tool."""
    return [["train"], ["lowprec", "train"]] if case.trains else [["lowprec"]]


def with_ways(day, night):
    """(case, way) of all: by day each case of `day` by one of its ways, which alternate; the others by night."""
    for number, case in enumerate([*day, *night]):
        for place, way in enumerate(ways(case)):
            by_day = number < len(day) and place == number % len(ways(case))
            yield pytest.param(case, way, id=f"{case.id}-{'-'.join(way)}", marks=[] if by_day else pytest.mark.nightly)


def answers(case, way, prepared, place, ask):
    """The faults of the answer that `ask` gets in a copy of the workplace."""
    shutil.copytree(prepared, place)
    if case.make:
        case.make(place)
    before = contents(place)
    done = ask([*way, *case.arguments], place, **dict(case.environment))
    faults = judge(case, done)
    after = contents(place)
    steps = [path for path in place.rglob("metrics.jsonl") if path.stat().st_size]
    faults += [f"{name} is no longer what it was" for name in before if after.get(name) != before[name]]
    if case.trains:
        faults += [f"{path}: a step was taken" for path in steps if str(path.relative_to(place)) not in before]
    return [*faults, done["err"]] if faults else []


@pytest.mark.parametrize(("case", "way"), list(with_ways(FORKED, [case for case in CASES if case not in FORKED])))
def test_one_error_that_holds_the_value(case, way, prepared, tmp_path):
    faults = answers(case, way, prepared, tmp_path / "place", forked)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("case", "way"), list(with_ways(STARTED, [case for case in CASES if case not in STARTED])))
def test_one_error_of_a_process(case, way, prepared, tmp_path):
    faults = answers(case, way, prepared, tmp_path / "place", in_process)
    assert not faults, "\n".join(faults)


def test_the_list_is_long_and_its_names_are_unique():
    names = [case.id for case in CASES]
    assert len(names) >= 150 and len(set(names)) == len(names)
