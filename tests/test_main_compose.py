"""Every shipped configuration composes, has the right types, and fits: from the checkout and as packaged."""

from copy import deepcopy
from functools import cache
from itertools import product

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.recipes import bf16, fp8, nvfp4
from lowprec_train.train import build, checks
from tests.parallel.runs import CASES, SUMMED
from tests.recipes import BY_NIGHT
from tests.recipes import composed as composed_in_two_steps

RECIPES, MODELS, DATA = (config.choices(group) for group in ("recipe", "model", "data"))
REQUIRED = {"indexed": ("data.train=x", "data.vocab_size=64"), "text": ("data.train=x",), "stdlib": ()}


@pytest.fixture(autouse=True)
def hydra_here():
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        yield


def composed(*overrides):
    run = OmegaConf.to_object(compose("train", overrides=list(overrides)))
    assert isinstance(run, config.RunConfig)
    return run


def test_the_promised_choices_are_there():
    assert set(RECIPES) == {
        *("bf16", "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "fp8_lm", "coat"),
        *("fp4", "fp4_mixed", "mxfp4", "mxfp4_fp8", "fp4_fold", "fp8_eden4", "nvfp4", "averis", "quartet2", "ufp4"),
        *("w4a8", "reduced_mantissa", "int8_switchback", "te_fp8"),
    }
    assert set(DATA) >= {"stdlib", "indexed"} and set(DATA) == set(REQUIRED)
    assert set(MODELS) >= {
        *("llama_tiny", "llama_20m", "llama_130m", "llama_350m", "llama_1b3", "llama_7b", "llama_13b", "llama_30b"),
        *("llama3_8b", "gpt_tiny", "gpt_125m", "gpt_345m", "gpt_1b3", "gpt_6b7", "gpt_13b", "gpt_175b"),
    }
    assert not [model for model in MODELS if "test" in model]  # models are users'; a test's own sizes are overrides


def pairs_by_day():
    """(recipe, model, data): by day each data with each recipe and with each model; all others by night, and by day
    as values (`test_every_recipe_fits_every_model`).

    What two groups of the configuration do to each other shows in a pair of their choices.
    """
    for (r, recipe), (m, model), data in product(enumerate(RECIPES), enumerate(MODELS), DATA):
        day = r == m % len(RECIPES)
        yield pytest.param(recipe, model, data, marks=[] if day else pytest.mark.nightly)


@pytest.mark.parametrize(("recipe", "model", "data"), list(pairs_by_day()))
def test_every_combination_composes_and_fits(recipe, model, data):
    run = composed(f"+recipe={recipe}", f"model={model}", f"data={data}", *REQUIRED[data])
    assert_fits(run, recipe, model)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in BY_NIGHT])
def test_every_recipe_fits_every_model(recipe):
    """As composed one by one: a recipe and a model are choices of groups that have no key in common."""
    run = composed(f"+recipe={recipe}")
    for model in MODELS:
        run.model = deepcopy(model_of(model))
        assert_fits(run, recipe, model)


@cache
def model_of(name):
    return composed(f"model={name}").model


def assert_fits(run, recipe, model):
    assert (run.precision.name, run.model.name) == (recipe, model)
    checks.configuration(run)
    run.model.layers = min(run.model.layers, 2)
    laid_out = build.layout(run)
    per_block = 4
    assert len(laid_out.phases[0].recipes) == run.model.layers * per_block + 1
    assert laid_out.phases[0].recipes["head"].is_identity
    assert laid_out.phases[0].recipes["blocks.0.mlp.down"].is_identity == (recipe == "bf16")


@pytest.mark.parametrize("schedule", config.choices("optim/schedule"))
def test_every_schedule_builds(schedule):
    run = composed(f"optim/schedule={schedule}", "optim.lr=2.0", "steps=100")
    built = build.construct(run.optim.schedule)
    assert built(9) == 2.0 and built(0) == pytest.approx(0.2) and built(99) < 0.3


@pytest.mark.parametrize("logger", config.choices("logger"))
def test_every_logger_composes(logger):
    expected = set() if logger == "none" else {"console", logger}
    assert set(composed(f"logger={logger}").logger) == expected


@pytest.mark.parametrize("experiment", config.choices("experiment"))
def test_every_experiment_composes(experiment):
    run = composed(f"+experiment={experiment}", "+recipe=fp4")
    checks.configuration(run)
    assert len(build.layout(run).phases[0].recipes) == 4 * run.model.layers + 1


@pytest.mark.parametrize("case", CASES | SUMMED)
def test_what_tests_compose_in_two_steps_is_what_hydra_composes(case):
    overrides = (*(CASES | SUMMED)[case], "steps=3")
    assert composed_in_two_steps(*overrides) == composed(*overrides)


def test_the_default_is_bf16_and_the_command_line_wins():
    assert composed().precision.name == "bf16"
    assert composed("+recipe=fp4", "optim.lr=9").optim.lr == 9.0
    assert composed("+recipe=fp4", "precision=bf16").precision.name == "bf16"


def test_the_override_tree_is_open_and_nothing_else_is():
    run = composed("+recipe=fp4", "precision.override.dgrad.a.format=E4M3", "precision.override.estimator=null")
    assert run.precision.override == {"dgrad": {"a": {"format": "E4M3"}}, "estimator": None}
    recipe = build.layout(run).phases[0].recipes["blocks.0.mlp.down"]
    assert recipe.dgrad.a.format.name == "E4M3" and recipe.wgrad.a.format.name == "E5M2"


def test_phases_are_a_choice_of_any_recipe():
    run = composed("+recipe=fp4", "precision/schedule=bf16_forward_end", "steps=100")
    first, last = build.layout(run).phases
    before, after = (phase.recipes["blocks.1.mlp.down"] for phase in (first, last))
    assert (
        last.first_step == 82 and after.fprop.codes_only and (after.dgrad, after.wgrad) == (before.dgrad, before.wgrad)
    )
    assert len(build.layout(composed("+recipe=fp4_mixed", "precision/schedule=none")).phases) == 1
    moved = composed("+recipe=fp4_mixed", "precision.schedule.end.at=0.5", "steps=100")
    assert [phase.first_step for phase in build.layout(moved).phases] == [0, 50]
    with pytest.raises(ValueError, match=r"precision.schedule.end: .*1.5"):
        build.layout(composed("+recipe=fp4_mixed", "precision.schedule.end.at=1.5"))


@pytest.mark.parametrize(("choice", "kind"), [("none", "nvfp4"), ("attention_bf16", "bf16"), ("attention_fp8", "fp8")])
def test_attention_may_be_left_out(choice, kind):
    recipes = build.layout(composed("+recipe=nvfp4", "model.layers=10", f"precision/exempt={choice}")).phases[0].recipes
    how = {"nvfp4": nvfp4.recipe(), "bf16": bf16.recipe(), "fp8": fp8.recipe()}
    for name, recipe in recipes.items():
        last = name.startswith(("blocks.8.", "blocks.9.", "head"))
        assert recipe == (how["bf16"] if last else how[kind] if "attention" in name else how["nvfp4"]), name


def test_two_phases_follow_each_other():
    run = composed("+recipe=nvfp4", "steps=8")
    policy = {"*": {"_target_": "lowprec_train.recipes.bf16.recipe"}}
    run.precision.schedule["late"] = config.PhaseConfig(at=0.75, policy=policy)
    run.precision.schedule["middle"] = config.PhaseConfig(at=0.5, policy=policy, forward_only=True)
    phases = build.layout(run).phases
    assert [phase.first_step for phase in phases] == [0, 4, 6]
    assert phases[1].recipes["blocks.0.mlp.down"].fprop.codes_only
    assert phases[2].recipes["blocks.0.mlp.down"].is_identity


def test_the_configuration_is_found_inside_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "lowprec_train"
    package.mkdir()
    monkeypatch.setattr(config, "__file__", str(package / "config.py"))
    assert config.directory() == tmp_path / "configs"
    (package / "configs").mkdir()
    assert config.directory() == package / "configs"
