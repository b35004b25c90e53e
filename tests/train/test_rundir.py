"""A run is found again by its name, told apart by its training keys, and never destroyed."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowprec_train.config import LAUNCH_FACTS, Resume
from lowprec_train.train import identity, rundir

CONFIG = {
    "name": None,
    "run_root": "runs",
    "seed": 1,
    "steps": 10,
    "model": {"name": "tiny", "dim": 8, "recompute": "none"},
    "data": {"seq_len": 8, "cache": None},
    "precision": {"name": "fp4", "override": {}, "deviations": ["one"]},
    "optim": {"lr": 1e-3, "schedule": {"_target_": "a.B"}},
    "logger": {"console": {"_target_": "a.C"}},
}


def changed(key, value):
    config = copy.deepcopy(CONFIG)
    *groups, last = key.split(".")
    node = config
    for group in groups:
        node = node[group]
    node[last] = value
    return config


@pytest.fixture
def begun(tmp_path):
    run = rundir.claim(tmp_path, "r", CONFIG, Resume.auto)
    run.write("config.yaml", CONFIG)
    run.release()
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "x"), ("run_root", "y"), ("logger.console._target_", "b"), ("logger", {}), ("model.recompute", "full"),
     ("data.cache", "/c"), ("precision.deviations", []), ("device", "cuda")],
)  # fmt: skip
def test_launch_facts_keep_the_name(key, value):
    assert identity.default_name(changed(key, value), "fp4") == identity.default_name(CONFIG, "fp4")


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 2), ("steps", 11), ("model.dim", 16), ("data.seq_len", 16), ("optim.lr", 2e-3), ("optim.schedule.end", 0),
     ("precision.override", {"dgrad": {"a": {"format": "E4M3"}}})],
)  # fmt: skip
def test_training_keys_change_the_name(key, value):
    assert identity.digest(changed(key, value)) != identity.digest(CONFIG)


@pytest.mark.parametrize(
    "places", [["text", "./text", "/data/text", ["a/text"]], [[0.7, "/a/x", 0.3, "y"], [0.7, "x", 0.3, "b/y"]]]
)
def test_a_place_counts_by_its_last_part(places):
    """And is no difference to a saved configuration: the corpus hash is compared."""
    named = [changed("data.train", place) for place in places]
    assert len({identity.digest(config) for config in named}) == 1 != identity.digest(CONFIG)
    assert identity.digest(changed("data.train", "other")) != identity.digest(named[0])
    assert identity.differences(changed("data.train", "other"), named[0]) == []


def test_first_weights_may_be_spelled_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spelled = ["runs/a", "./runs/a", "runs/b/../a", str(tmp_path / "runs" / "a")]
    assert len({identity.digest(changed("weights", path)) for path in spelled}) == 1
    assert identity.differences(changed("weights", "/elsewhere/a"), changed("weights", "runs/a"))


def test_length_alone():
    longer, other = changed("steps", 20), changed("seed", 2)
    assert identity.longer(CONFIG, longer) and not identity.longer(CONFIG, CONFIG)
    assert not identity.longer(CONFIG, other) and not identity.longer(other, longer)
    assert identity.family(CONFIG) == identity.family(longer) != identity.family(other)


def test_files_of_a_run_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    events = []
    record(monkeypatch, events)
    run = rundir.claim(tmp_path, "r", CONFIG, Resume.auto)
    run.write("config.yaml", CONFIG)
    run.release()
    assert events == ["sync config.yaml.partial", "replace config.yaml", "sync r"]


def record(monkeypatch, events):
    """Remember what is synced and what gets a new name, in order."""
    sync, replace = os.fsync, os.replace

    def synced(descriptor):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def replaced(source, target):
        events.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)


def test_the_default_name_is_readable():
    name = identity.default_name(CONFIG, "fp4")
    assert name.startswith("tiny-fp4-") and len(name) == len("tiny-fp4-") + 8


def test_every_launch_fact_is_a_real_key():
    from omegaconf import OmegaConf

    from lowprec_train.config import ModelConfig, OptimConfig, PrecisionConfig, RunConfig

    known = {*RunConfig.__dataclass_fields__, "data.cache"}
    known |= {f"optim.{k}" for k in OptimConfig.__dataclass_fields__}
    known |= {f"model.{k}" for k in ModelConfig.__dataclass_fields__}
    known |= {f"precision.{k}" for k in PrecisionConfig.__dataclass_fields__}
    assert set(LAUNCH_FACTS) <= known
    assert OmegaConf.structured(RunConfig) is not None


def test_a_saved_configuration_survives_its_file(begun):
    run = rundir.claim(begun, "r", CONFIG, Resume.auto)
    assert run.resumed and run.path == begun / "r"
    run.release()


def test_a_key_that_older_runs_do_not_have_is_no_difference_at_its_neutral_value():
    """Such a run goes on under its name; another value is another run."""
    now = {"steps": 3, "model": {"name": "m", "dim": 8, "norm_placement": "pre", "head_dim": None}, "comm": {"a": 1}}
    older = {"steps": 3, "model": {"name": "m", "dim": 8}, "comm": {"a": 1}}
    now["comm"]["node_size"] = now["model"]["qkv_bias"] = now["model"]["rope_scaling"] = None
    assert identity.differences(older, now) == [] and identity.digest(older) == identity.digest(now)
    now["model"]["head_dim"] = 16
    assert identity.differences(older, now) == ["model.head_dim: saved (absent), now 16"]
    assert identity.digest(older) != identity.digest(now)


def test_another_configuration_is_refused_with_both_values(begun):
    with pytest.raises(ValueError) as error:
        rundir.claim(begun, "r", changed("optim.lr", 0.5), Resume.auto)
    text = str(error.value)
    assert "optim.lr: saved 0.001, now 0.5" in text
    assert "resume=never" in text and "name=" in text and "seed" not in text


def test_a_key_on_one_side_only_is_a_difference():
    now = changed("optim.schedule", {"end": 1})
    lines = identity.differences(CONFIG, now)
    assert lines == ["optim.schedule.end: saved (absent), now 1", "optim.schedule._target_: saved 'a.B', now (absent)"]


def test_resume_never_moves_the_earlier_run_aside(begun):
    (begun / "r" / "metrics.jsonl").write_text("kept")
    for number in (1, 2):
        run = rundir.claim(begun, "r", changed("seed", number), Resume.never)
        assert not run.resumed and not (begun / "r" / "config.yaml").exists()
        run.write("config.yaml", changed("seed", number))
        run.release()
        assert (begun / f"r.{number}" / "config.yaml").exists()
    assert (begun / "r.1" / "metrics.jsonl").read_text() == "kept"


def test_a_claim_without_a_run_leaves_nothing(tmp_path):
    rundir.claim(tmp_path, "r", CONFIG, Resume.auto).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_is_one_plain_directory(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name a directory"):
        rundir.claim(tmp_path, name, CONFIG, Resume.auto)


def test_a_root_that_is_a_file_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot use run directory"):
        rundir.claim(tmp_path / "file", "r", CONFIG, Resume.auto)


def test_one_process_holds_a_run_until_it_dies(begun):
    code = (
        "import sys,pathlib,json; from lowprec_train.train import rundir; from lowprec_train.config import Resume\n"
        f"run = rundir.claim(pathlib.Path({str(begun)!r}), 'r', {CONFIG!r}, Resume.auto)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    for resume in Resume:
        with pytest.raises(ValueError, match="in use by another process"):
            rundir.claim(begun, "r", CONFIG, resume)
    other.kill()
    other.wait()
    rundir.claim(begun, "r", CONFIG, Resume.auto).release()
