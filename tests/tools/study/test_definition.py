"""STUDY.yaml: what is read, and the one error that names what is wrong in it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lowprec_train.tools import cli
from lowprec_train.tools.study import definition, plan
from tests.launches import environment

GOOD = {
    "name": "small",
    "baseline": "bf16",
    "overrides": ["steps=10", "optim=adamw"],
    "arms": {"bf16": None, "own": {"recipe": "fp8", "overrides": ["optim.lr=0.002"]}},
    "blocks": [
        {"purpose": "gate", "seeds": [101], "arms": ["bf16"], "again": ["bf16"]},
        {"purpose": "estimate", "seeds": [1, 2], "axes": {"steps": [10, 20]}},
    ],
    "contrasts": [["own", "bf16"]],
}


def written(folder, called="study.yaml", **changes):
    file = folder / called
    file.write_text(yaml.safe_dump(GOOD | changes))
    return file


def test_runs_in_order_of_blocks(tmp_path):
    study = definition.load(written(tmp_path))
    runs = plan.runs(study)
    assert [run.name for run in runs] == [
        *("bf16-s101", "bf16-s101-again"),
        *("bf16-steps_10-s1", "own-steps_10-s1", "bf16-steps_20-s1", "own-steps_20-s1"),
        *("bf16-steps_10-s2", "own-steps_10-s2", "bf16-steps_20-s2", "own-steps_20-s2"),
    ]
    assert [run.purpose for run in runs] == ["gate"] * 2 + ["estimate"] * 8
    assert runs[5].command(tmp_path) == [
        *("+recipe=fp8", "optim=adamw", "optim.lr=0.002", "steps=20", "seed=1", "name=own-steps_20-s1"),
        f"run_root={tmp_path}",
    ]


def test_an_arm_composes_with_what_the_study_and_the_axis_say(tmp_path):
    runs = plan.runs(definition.load(written(tmp_path)))
    made = plan.check(definition.load(written(tmp_path)), runs)["own-steps_20-s1"]
    assert (made.steps, made.optim.lr, made.precision.name, made.seed, made.data["seed"]) == (20, 0.002, "fp8", 1, 1)
    assert made.optim.second_moment["format"] == "FP32"


def test_null_on_an_axis_is_null(tmp_path):
    axes = {"optim.schedule.warmup_fraction": [None, 0.1]}
    blocks = [{"purpose": "sweep", "seeds": [1], "arms": ["bf16"], "axes": axes}]
    runs = plan.runs(definition.load(written(tmp_path, blocks=blocks)))
    assert [run.name for run in runs] == ["bf16-warmup_fraction_null-s1", "bf16-warmup_fraction_0.1-s1"]
    assert runs[0].overrides[-1] == "optim.schedule.warmup_fraction=null"


def test_two_runs_of_one_name_are_refused(tmp_path):
    """Keys with one last part, in two blocks or in one; the same run in two blocks is one run."""
    one = {"purpose": "sweep", "seeds": [1], "axes": {"optim.first_moment.block": [64]}, "arms": ["bf16"]}
    other = one | {"axes": {"optim.second_moment.block": [64]}}
    with pytest.raises(ValueError, match=r"two runs would be named bf16-block_64-s1: optim\.first_moment\.block=64, "):
        plan.runs(definition.load(written(tmp_path, blocks=[one, other])))
    assert len(plan.runs(definition.load(written(tmp_path, blocks=[one, one])))) == 1


def test_a_trunk_that_two_blocks_share_is_a_repeat_where_one_of_them_has_its_arm(tmp_path):
    fork = {"purpose": "estimate", "seeds": [1], "fork": {"arm": "bf16", "step": 5}}
    runs = plan.runs(definition.load(written(tmp_path, blocks=[fork | {"arms": ["own"]}, fork])))
    counted = [(run.arm, run.seed) for run in runs if not run.repeat]
    assert [run.name for run in runs] == ["bf16-trunk5-s1", "own-from5-s1", "bf16-from5-s1"]
    assert counted == [("own", 1), ("bf16", 1)]


WRONG = {
    "study.arm={}: there is no such key; did you mean arms?": {"arm": {}},
    "arms.own.recipe: 'fp9' is none of": {"arms": {"bf16": None, "own": {"recipe": "fp9"}}},
    "arms.own.override=[]: there is no such key; did you mean overrides?": {
        "arms": {"bf16": None, "own": {"override": []}}
    },
    "baseline: 'bf61' is none of bf16, own; did you mean bf16?": {"baseline": "bf61"},
    "contrasts[0]: 'fp8' is none of bf16, own": {"contrasts": [["fp8", "bf16"]]},
    "contrasts[0]: ['bf16', 'bf16'] must be two different arms": {"contrasts": [["bf16", "bf16"]]},
    "overrides: 'seed=3': seed is decided": {"overrides": ["seed=3"]},
    "overrides: '+recipe=fp8': the recipe belongs to an arm": {"overrides": ["+recipe=fp8"]},
    "overrides: 'fast' is no override": {"overrides": ["fast"]},
    "blocks[0].purpose='gates' must be one of gate, sweep, estimate": {"blocks": [{"purpose": "gates", "seeds": [1]}]},
    "blocks[0].seeds: [1, 1] must be": {"blocks": [{"purpose": "gate", "seeds": [1, 1]}]},
    "blocks[0].seeds=[True] must be a list of whole numbers": {"blocks": [{"purpose": "gate", "seeds": [True]}]},
    "blocks[0].seeds: [-1] must be one or more seeds from 0 to 2^63 - 1, each once": {
        "blocks": [{"purpose": "gate", "seeds": [-1]}]
    },
    "blocks[0].axes.optim.lr: [0.001, 0.001] must hold each value once": {
        "blocks": [{"purpose": "gate", "seeds": [1], "axes": {"optim.lr": [1e-3, 0.001]}}]
    },
    "blocks[0].fork.step=0 must be at least 1": {
        "blocks": [{"purpose": "gate", "seeds": [1], "fork": {"arm": "bf16", "step": 0}}]
    },
    "blocks[0]: 3 must be keys and values": {"blocks": [3]},
    "blocks[0].again: 'own' is none of bf16": {
        "blocks": [{"purpose": "gate", "seeds": [1], "arms": ["bf16"], "again": ["own"]}]
    },
    "blocks[0].axes: 'data.seed=': data.seed is decided": {
        "blocks": [{"purpose": "gate", "seeds": [1], "axes": {"data.seed": [1]}}]
    },
    "seed 1 is for sweep and for estimate": {
        "blocks": [{"purpose": "sweep", "seeds": [1]}, {"purpose": "estimate", "seeds": [2, 1]}]
    },
    "blocks[0].axes.data.train: 'a/b' cannot be part of a run's name": {
        "blocks": [{"purpose": "gate", "seeds": [1], "axes": {"data.train": ["a/b"]}}]
    },
    "name: 'a/b' cannot be part": {"name": "a/b"},
    "keep_checkpoints='no' must be true or false": {"keep_checkpoints": "no"},
    "arms.own.predicted='1 %' must be a number or null": {
        "arms": {"bf16": None, "own": {"recipe": "fp8", "predicted": "1 %"}},
        "contrasts": [],
    },
}


@pytest.mark.parametrize("told", WRONG)
def test_one_error_names_the_value(told, tmp_path):
    file = written(tmp_path, **WRONG[told])
    with pytest.raises(ValueError) as error:
        definition.load(file)
    assert str(error.value).startswith(f"{file}: ") and told in str(error.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps=3", "bf16-steps_10-s1 has steps=10"),
        ("++optim.lr=1", "own-steps_10-s1 has optim.lr=0.002"),
        ("comm.codec.format=E4M3", "own-steps_10-s1 has comm.codec=null"),
        ("checkpoint_interval=7", ""),
        ("optim.eps=1e-9", ""),
        ("eval_interval=5 eval_interval=6", ""),
        ("steps=10 steps=3", "bf16-steps_10-s1 has steps=10"),
        ("comm.codec=null comm.codec.format=E4M3", "own-steps_10-s1 has comm.codec=null"),
    ],
)
def test_an_override_that_some_runs_would_ignore_is_refused(override, says, tmp_path, capsys):
    """By the selected runs: arm `apart` sets what any other override would change. A trunk saves where its forks begin;
    of a repeated key the last counts.
    """
    own = {"recipe": "fp8", "overrides": ["optim=adamw", "optim.lr=0.002", "comm.codec=null"]}
    arms = {"bf16": None, "own": own, "apart": {"recipe": "fp8", "overrides": ["optim.eps=1", "optim=muon"]}}
    blocks = [{"purpose": "estimate", "seeds": [1], "axes": {"steps": [10]}, "arms": ["bf16", "own"]}]
    if override.startswith("checkpoint_interval"):
        blocks = [{"purpose": "estimate", "seeds": [1], "fork": {"arm": "bf16", "step": 5}}]
    file = written(tmp_path, arms=arms, blocks=blocks)
    status = cli.main(["study", "list", str(file), "--set", *override.split(), "--arms", "bf16", "own"])
    said = f"lowprec study: error: --set {override.split()[-1]}: {says}; change it in a copy of the study\n"
    assert (status, capsys.readouterr().err) == ((2, said) if says else (0, ""))


@pytest.mark.parametrize("out", ["a,b", "a[1]", "it's", "1e3", "a=b"])
def test_a_folder_that_hydra_reads_otherwise_is_refused(out, tmp_path, capsys):
    command = ["study", "list", str(written(tmp_path)), "--out", out]
    assert cli.main(command) == 0, "it starts no run"
    capsys.readouterr()
    assert cli.main([*command, "--task", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"lowprec study: error: --out {out}: Hydra does not read this path")


def test_a_study_cannot_come_after_itself(tmp_path):
    file = written(tmp_path, after=["second.yaml"])
    (tmp_path / "second.yaml").write_text(file.read_text().replace("second.yaml", file.name))
    with pytest.raises(ValueError, match=f"after: {file.name} comes after itself"):
        definition.load(file)


def test_the_fault_of_a_file_that_is_not_yaml_is_told_with_its_line(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text("name: small\narms: {bf16: }\nname: other\n")
    with pytest.raises(ValueError) as error:
        definition.load(file)
    assert str(error.value) == f"{file} is not YAML: found duplicate key name (line 3)"


def test_seeds_that_chose_a_setting_do_not_judge_it(tmp_path):
    written(tmp_path, "sweep.yaml", blocks=[{"purpose": "sweep", "seeds": [2]}])
    with pytest.raises(ValueError, match="seed 2 is an estimate seed, and sweep.yaml, which chose this setting"):
        definition.load(written(tmp_path, after=["sweep.yaml"]))


UNFIT = {
    "arm own (steps=10): Could not override 'optim.lrr'": {
        "arms": {"bf16": None, "own": {"recipe": "fp8", "overrides": ["optim.lrr=1"]}}
    },
    "fork.step=10 must be below steps=10": {
        "blocks": [{"purpose": "gate", "seeds": [1], "fork": {"arm": "bf16", "step": 10}}]
    },
    "optim.first_moment._target_=lowprec_train.optim.codecs.scaled, and bf16": {
        "arms": {"bf16": None, "own": {"recipe": "fp8_lm", "overrides": ["optim=adamw_fp8lm"]}},
        "blocks": [{"purpose": "gate", "seeds": [1], "fork": {"arm": "bf16", "step": 5}}],
    },
}


@pytest.mark.parametrize("told", UNFIT)
def test_what_cannot_train_is_refused_before_anything_is(told, tmp_path):
    study = definition.load(written(tmp_path, **UNFIT[told]))
    with pytest.raises(ValueError) as error:
        plan.check(study, plan.runs(study))
    assert told in str(error.value) and "study small" in str(error.value)


DAILY = ("short_33m", "tiny")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in DAILY else pytest.mark.nightly) for each in definition.shipped()]
)
def test_shipped_studies_can_be_trained(name):
    """By day the short ones."""
    study = definition.load(definition.find(Path(name)))
    assert study.name == name
    plan.check(study, [run for run in plan.runs(study) if run.seed == study.blocks[0].seeds[0]])


def test_a_seed_keeps_its_purpose_in_a_folder(tmp_path, capsys):
    gate = written(tmp_path, blocks=[{"purpose": "gate", "seeds": [1]}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "seeds.json").write_text('{"1": "estimate"}')
    assert cli.main(["study", "run", str(gate), "--nproc", "1", "--out", str(tmp_path / "out")]) == 2
    assert "seed 1 has the purpose estimate in" in capsys.readouterr().err


def test_a_task_of_the_array_is_one_run(tmp_path):
    """study.sbatch asks for the overrides of its task and gives them to train.sbatch, spaces and all."""
    file, sbatch = written(tmp_path), Path(__file__).parents[3] / "scripts" / "slurm" / "study.sbatch"
    for name, text in {
        "bin/lowprec": f'#!/bin/sh\nexec "{sys.executable}" -m lowprec_train.tools.cli "$@"\n',
        "scripts/slurm/train.sbatch": 'printf "%s\\n" "$@"\n',
        "bin/activate": f'PATH="{tmp_path}/bin:$PATH"\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = ["bash", sbatch, file, "--purpose", "estimate", "--out", "some where"]
    place = environment(SLURM_SUBMIT_DIR=str(tmp_path), SLURM_ARRAY_TASK_ID="3", VENV=str(tmp_path))
    done = subprocess.run(list(map(str, words)), env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["seed=1", "name=own-steps_20-s1", "run_root=some where"]


def test_the_array_that_the_script_shows_has_every_run():
    script = Path(__file__).parents[3] / "scripts" / "slurm" / "study.sbatch"
    runs = plan.runs(definition.load(definition.find(Path("main_130m"))))
    assert f"--array=0-{len(runs) - 1} scripts/slurm/study.sbatch main_130m" in script.read_text()


def test_seeds_select_runs(tmp_path, capsys):
    """Each with the run of its seed that it forks from."""
    file = written(tmp_path)
    names = [run.name for run in plan.runs(definition.load(file)) if run.seed in (1, 101)]
    assert cli.main(["study", "list", str(file), "--seeds", "1", "101"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "not begun" in line]
    assert listed[: len(names)] == names and len(names) < len(plan.runs(definition.load(file)))
    assert cli.main(["study", "list", "branch_130m", "--arms", "fp8", "--seeds", "2"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "not begun" in line][:2] == [
        "bf16-trunk750-s2",
        "fp8-from750-s2",
    ]
    assert cli.main(["study", "list", str(file), "--slurm", "--seeds", "1", "101"]) == 0
    assert "--seeds 1 101" in capsys.readouterr().out
    assert cli.main(["study", "list", str(file), "--seeds", "1", "7"]) == 2
    assert "--seeds 7: study" in capsys.readouterr().err
    assert cli.main(["study", "list", str(file), "--seeds", "1", "--purpose", "gate"]) == 2
    assert "with --seeds 1 for --purpose gate" in capsys.readouterr().err


def test_a_job_array(tmp_path, capsys):
    file = written(tmp_path)
    assert cli.main(["study", "list", str(file), "--slurm", "--purpose", "estimate", "--set", "micro_batch=2"]) == 0
    told = capsys.readouterr().out.strip()
    assert told == f"sbatch --array=0-7 scripts/slurm/study.sbatch {file} --purpose estimate --set micro_batch=2"
    assert cli.main(["study", "list", str(file), "--slurm", "--set", "optim.lrr=2"]) == 2  # not in each job
    assert "optim.lrr" in capsys.readouterr().err
    assert cli.main(["study", "list", str(file), "--task", "1", "--out", "there"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["name=bf16-s101-again", "run_root=there"]
    assert cli.main(["study", "list", str(file), "--task", "10"]) == 2
