"""What this machine lacks is said before any work; numbers that must fit are tested through main."""

import shutil
import sys
from dataclasses import replace
from importlib import util

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.config import Compile
from lowprec_train.train import checks, launch

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def composed():
    """The shipped configuration."""
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        return OmegaConf.to_object(compose("train"))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def bare(monkeypatch):
    """No compiler, no triton."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(util, "find_spec", lambda name: None)


def test_devices_of_a_machine_with_gpus(two_gpus):
    assert checks.device("auto") == checks.device("cuda") == torch.device("cuda", 0)
    assert checks.device("cuda:1") == torch.device("cuda", 1)
    assert checks.device("cpu") == CPU
    with pytest.raises(ValueError, match="cuda:2 does not exist: torch finds 2 CUDA devices"):
        checks.device("cuda:2")


def test_devices_of_a_machine_without(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks.device("auto") == CPU
    with pytest.raises(ValueError, match="device=cuda needs a GPU, but torch .* finds no CUDA device"):
        checks.device("cuda")


@pytest.mark.parametrize("name", ["tpu", "", "cuda:", "cuda:x", "gpu:0", "cpu:0"])
def test_unknown_devices(two_gpus, name):
    with pytest.raises(ValueError, match=f"device={name} is not one of"):
        checks.device(name)


def test_compile_is_for_cuda_unless_asked_for(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    found = {(choice, on.type): checks.compiles(choice, on) for choice in Compile for on in (CPU, CUDA)}
    assert found == {
        (Compile.auto, "cpu"): False,
        (Compile.auto, "cuda"): True,
        (Compile.on, "cpu"): True,
        (Compile.on, "cuda"): True,
        (Compile.off, "cpu"): False,
        (Compile.off, "cuda"): False,
    }


def test_compile_without_a_compiler(bare):
    assert not checks.compiles(Compile.auto, CPU)
    with pytest.raises(ValueError, match=r"compile=on on cpu needs a compiler, and none of c\+\+, g\+\+, clang\+\+"):
        checks.compiles(Compile.on, CPU)
    with pytest.raises(ValueError, match="compile=auto on cuda:0 needs triton, which is not installed; compile=off"):
        checks.compiles(Compile.auto, CUDA)


def test_a_corpus_that_changed():
    checks.corpus("r", None, "aa")
    checks.corpus("r", "aa", "aa")
    with pytest.raises(ValueError, match="run 'r' was started on a corpus with hash aa, but the data now has hash bb"):
        checks.corpus("r", "aa", "bb")


def test_the_launcher_tells_the_processes(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.world() == launch.World(0, 1, 0) and launch.world().leads
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert launch.world() == launch.World(3, 8, 1) and not launch.world().leads
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.world() == launch.World(3, 8, 1, local_processes=2)


def test_loggers_whose_package_is_missing(composed, bare):
    run = replace(composed, device="cpu", compile=Compile.off, logger={"console": {}, "wandb": {}})
    with pytest.raises(
        ValueError, match=r"logger=wandb needs the package 'wandb': pip install 'lowprec_train\[wandb\]'"
    ):
        checks.configuration(run)


def test_a_directory_of_a_loggers_name_is_no_package(composed, tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = replace(composed, device="cpu", compile=Compile.off, logger={"wandb": {}})
    with pytest.raises(ValueError, match="logger=wandb needs the package 'wandb'"):
        checks.configuration(run)


@pytest.mark.parametrize(("value", "shown"), [(None, "null"), (5, "5"), (True, "True"), ("quiet", "'quiet'")])
def test_loggers_that_are_no_nodes(composed, value, shown):
    run = replace(composed, device="cpu", logger={"console": value})
    checks.configuration(run)
    with pytest.raises(ValueError, match=f"^logger.console={shown} must be a mapping with a _target_"):
        checks.nodes(run)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"param_all_gather": "fp8"}, "parallel.param_all_gather='fp8' is not one of auto, fp32, bf16, quantized"),
        ({"grad_reduce": "never"}, "parallel.grad_reduce='never' is not one of last_microbatch, every_microbatch"),
    ],
)
def test_choices_of_parallel(composed, asked, message):
    with pytest.raises(ValueError, match=message):
        checks.choices(replace(composed.parallel, **asked))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"first": 301, "steps": 1}, "profile.first=301 is after the last step, 300"),
        ({"first": 0}, "profile.first=0 must be at least 1"),
        ({"steps": -1}, "profile.steps=-1"),
        ({"ranks": [0, 1]}, "profile.ranks=.0, 1.: there is no rank 1 among 1 processes"),
        ({"steps": 3, "ranks": []}, "profile.steps=3 with profile.ranks=.. profiles nothing"),
        (
            {"allocations": 9},
            "profile.allocations=9 records GPU memory, and this run is on cpu; use profile.memory=true",
        ),
    ],
)
def test_profiles_that_cannot_be(composed, asked, message):
    run = replace(composed, device="cpu", profile=replace(composed.profile, **asked))
    with pytest.raises(ValueError, match=message):
        checks.configuration(run)
    checks.configuration(replace(composed, device="cpu"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tags", ["ok", ""], "logger.wandb.tags: '' must have 1 to 64 characters"),
        ("tags", ["x" * 65], "must have 1 to 64 characters"),
        ("project", "a/b", "logger.wandb.project=a/b: a name cannot have /"),
    ],
)
def test_what_wandb_would_refuse_late(composed, key, value, says):
    node = {"_target_": "lowprec_train.train.logging.wandb_sink.WandbSink", "tags": ["ok"], "project": "a-b"}
    checks.nodes(replace(composed, logger={"wandb": node}))
    with pytest.raises(ValueError, match=says):
        checks.nodes(replace(composed, logger={"wandb": node | {key: value}}))
