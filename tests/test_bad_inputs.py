"""Every bad input of tests/bad_inputs ends in one short error that holds the value, and changes no earlier file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec_train.data.cache import build_once
from tests.bad_inputs import models, recipes, runs, settings, text, tools, workplace

ROOT = Path(__file__).parent.parent
DAILY = [*settings.NAMES, *settings.TYPES]
NIGHTLY = [*settings.NUMBERS, *settings.FITTING, *recipes.CASES, *runs.CASES, *text.CASES, *models.CASES, *tools.CASES]
CASES = [*DAILY, *NIGHTLY]
LINES = 6
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_MODE", "HYDRA_FULL_ERROR")


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def server():
    """A function of (arguments, directory, environment) that returns the status and what was written."""
    command = [sys.executable, "-m", "tests.bad_inputs.server"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(arguments, directory, **more):
        asked = {"arguments": arguments, "directory": str(directory), "environment": more}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="session")
def prepared(server, tmp_path_factory):
    """The workplace, made by one of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make(directory):
        workplace.write_text(directory)
        for command in workplace.COMMANDS:
            done = server(command, directory)
            assert done["status"] == 0, (command, done)

    return build_once(shared / "bad-inputs", make)


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


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(each, id=each.id) for each in DAILY)]
    + [pytest.param(each, id=each.id, marks=pytest.mark.nightly) for each in NIGHTLY],
)
def test_one_error_that_holds_the_value(case, server, prepared, tmp_path):
    place = tmp_path / "place"
    shutil.copytree(prepared, place)
    if case.make:
        case.make(place)
    before = contents(place)
    arguments = ["train" if case.trains else "lowprec", *case.arguments]
    done = server(arguments, place, **dict(case.environment))
    faults = judge(case, done)
    after = contents(place)
    steps = [path for path in place.rglob("metrics.jsonl") if path.stat().st_size]
    faults += [f"{name} is no longer what it was" for name in before if after.get(name) != before[name]]
    if case.trains:
        faults += [f"{path}: a step was taken" for path in steps if str(path.relative_to(place)) not in before]
    assert not faults, "\n".join([*faults, done["err"]])


def test_the_list_is_long_and_its_names_are_unique():
    names = [case.id for case in CASES]
    assert len(names) >= 150 and len(set(names)) == len(names)
