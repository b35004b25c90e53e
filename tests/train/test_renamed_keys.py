"""An old key or value is refused with one error that names the new one, wherever it stands."""

from dataclasses import fields

import pytest
import yaml
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.tools import cli
from lowprec_train.train import rundir
from lowprec_train.train.command_line import explained
from lowprec_train.train.compose import composed
from lowprec_train.train.renamed_keys import KEYS, VALUES, in_tree, new_key
from lowprec_train.train.trained import Trained

OLD = {  # a setting -> what it is called now
    "clip_norm=0.5": "max_grad_norm=0.5",
    "max_skipped=3": "max_nonfinite_steps=3",
    "keep=3": "checkpoint_keep=3",
    "parallel.sync=last": "parallel.grad_reduce=last_microbatch",
    "parallel.sync=each": "parallel.grad_reduce=every_microbatch",
    "parallel.gather=master": "parallel.param_all_gather=fp32",
    "parallel.gather=bf16": "parallel.param_all_gather=bf16",
    "parallel.gather=codes": "parallel.param_all_gather=quantized",
    "parallel.gather=int4": "parallel.param_all_gather=int4",
    "comm.plain=[a]": "comm.exclude=[a]",
    "precision.keep.group=32": "precision.saved_activations.group=32",
    "precision/keep=coat": "precision/saved_activations=coat",
    "precision.override.keep=CODES": "precision.override.saved_input=CODES",
    "precision.override.fprop.b.span=14": "precision.override.fprop.b.exponent_span=14",
    "precision.schedule.late.override.dgrad.a.span=14": "precision.schedule.late.override.dgrad.a.exponent_span=14",
    "precision.schedule.late.override.dgrad.a.stochastic=true": (
        "precision.schedule.late.override.dgrad.a.rounding=stochastic"
    ),
    "model=from/weights": "model=from_checkpoint",
    "parallel.grad_reduce=last": "parallel.grad_reduce=last_microbatch",
    "parallel.grad_reduce='each'": "parallel.grad_reduce=every_microbatch",
    "parallel.param_all_gather=master": "parallel.param_all_gather=fp32",
    "parallel.param_all_gather=codes": "parallel.param_all_gather=quantized",
}
FILES = {  # of a file of settings -> what is called otherwise now
    "clip_norm: 0.5": "max_grad_norm",
    "max_skipped: 3": "max_nonfinite_steps",
    "keep: 3": "checkpoint_keep",
    "parallel: {sync: each}": "parallel.grad_reduce",
    "parallel: {gather: codes}": "parallel.param_all_gather",
    "parallel: {param_all_gather: codes}": "parallel.param_all_gather=quantized",
    "parallel: {grad_reduce: last}": "parallel.grad_reduce=last_microbatch",
    "comm: {plain: ['*head*']}": "comm.exclude",
    "precision: {keep: {group: 32}}": "precision.saved_activations",
    "defaults: [{override /precision/keep: coat}]": "precision/saved_activations",
    "defaults: [{override /model: from/weights}]": "model=from_checkpoint",
}


def said(*overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        composed(*overrides)
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_settings(old, new):
    assert said(old) == f"renamed configuration keys: {old.replace(chr(39), '')} is now {new}"


@pytest.mark.parametrize("sign", ["+", "++", "~"])
@pytest.mark.parametrize("key", [key for key in KEYS if "*" not in key])
def test_a_sign_makes_no_key(sign, key):
    assert f"is now {KEYS[key]}" in said(f"{sign}{key}" + ("" if sign == "~" else "=1"))


def test_several_are_one_error():
    told = said("clip_norm=1", "steps=5", "keep=2")
    assert told == "renamed configuration keys: clip_norm=1 is now max_grad_norm=1, keep=2 is now checkpoint_keep=2"


@pytest.mark.parametrize(("settings", "new"), FILES.items())
def test_files(settings, new, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{settings}\n")
    assert f"is now {new}" in said(f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine")


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("defaults: [fp4, {keep: none}, _self_]", "precision/saved_activations"),
        ("defaults: [fp4, _self_]\nschedule: {end: {at: 0.5, keep: {}}}", "precision.schedule.end.saved_activations"),
    ],
)
def test_precision_files(text, new, tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text(f"{text}\n")
    assert f"is now {new}" in said(f"hydra.searchpath=[file://{tmp_path}]", "precision=mine")


def test_the_value_of_an_option_is_no_setting():
    told = explained(ValueError("no"), ["--config-dir", "keep", "clip_norm=1"])
    assert told == "renamed configuration keys: clip_norm=1 is now max_grad_norm=1"


def test_tools(capsys):
    assert cli.main(["estimate", "parallel.gather=codes"]) == 2
    assert "parallel.gather=codes is now parallel.param_all_gather=quantized" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_is_not_resumed(tmp_path):
    run = tmp_path / "old"
    run.mkdir()
    saved = {"model": {}, "steps": 3, "keep": 2, "clip_norm": 1.0, "parallel": {"gather": "codes"}}
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(ValueError) as error:
        rundir.claim(tmp_path, "old", {}, config.Resume.auto)
    for part in ("old/config.yaml", "clip_norm=1.0 is now max_grad_norm=1.0", "keep=2 is now checkpoint_keep=2"):
        assert part in str(error.value)
    assert "parallel.gather=codes is now parallel.param_all_gather=quantized" in str(error.value)
    with rundir.claim(tmp_path, "old", {}, config.Resume.never) as fresh:
        assert not fresh.resumed and (tmp_path / "old.1" / "config.yaml").exists()


def test_a_model_of_an_earlier_version_is_not_evaluated(tmp_path, monkeypatch):
    """Under the recipe of its run, which its configuration tells."""
    (tmp_path / "config.yaml").write_text("precision: {keep: {group: 16}}\nsteps: 3\n")
    monkeypatch.setattr("lowprec_train.train.trained.open_weights", lambda path, step: None)
    trained = Trained(tmp_path)
    monkeypatch.setattr(Trained, "_laid_out", lambda self, dtype: None)
    with pytest.raises(ValueError, match=r"config\.yaml .*precision\.keep is now precision\.saved_activations"):
        trained.forward("run")


def test_the_new_names_are_keys():
    """Of the schema, or of a shipped node; and no old name is one."""
    config.register()
    asked = composed("comm=fp8", "precision/schedule=bf16_end")
    run = OmegaConf.create(vars(asked), flags={"allow_objects": True})
    for old, new in KEYS.items():
        key, was = (each.replace("*", "end") for each in (new, old))
        parent, _, name = key.rpartition(".")
        if ".override" in parent:  # an open tree, whose keys are a recipe's or a quantiser's
            known = {field.name for field in fields(LinearRecipe if parent.endswith("override") else Quantizer)}
            assert name in known and was.rpartition(".")[2] not in known
            continue
        assert OmegaConf.select(run, key) is not None and new_key(new) is None
        assert OmegaConf.select(run, was) is None
    assert set(VALUES) - {"model"} <= set(KEYS.values())


def test_shipped_configurations_have_no_old_name():
    for path in config.directory().rglob("*.yaml"):
        tree = OmegaConf.to_container(OmegaConf.load(path))
        assert not isinstance(tree, dict) or not list(in_tree(tree)), path
