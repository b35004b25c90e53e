"""Parts come out of a configuration with the configuration's values in them."""

import logging
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lowprec_train import config
from lowprec_train.config import PrecisionConfig
from lowprec_train.numerics.formats import E4M3
from lowprec_train.train import build, describe
from lowprec_train.train.compose import composed as compose_typed
from lowprec_train.train.compose import typed
from lowprec_train.train.describe import Choice

CPU = torch.device("cpu")
AVERIS = "lowprec_train.recipes.averis.recipe"
LATE = "precision.schedule.late"
BF16 = "{blocks.*: {_target_: lowprec_train.recipes.bf16.recipe}, head: {_target_: lowprec_train.recipes.bf16.recipe}}"
SMALL = ("model.layers=3", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=1", "model.vocab_size=128")


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        return OmegaConf.to_object(compose("train", overrides=[*SMALL, *overrides]))


def target(name, **arguments):
    return {"_target_": name, **arguments}


def test_construct_passes_values_and_objects():
    built = build.construct(target("builtins.dict", a=[1, 2], b=target("fractions.Fraction", numerator=3)), c=CPU)
    assert built == {"a": [1, 2], "b": 3, "c": CPU} and built["c"] is CPU and type(built["a"]) is list


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (target("no.such.thing"), "no.such.thing"),
        (target("fractions.Fraction", colour=1), "fractions.Fraction.*colour"),
        (target("fractions.Fraction", numerator="x"), "Invalid literal for Fraction: 'x'"),
        (True, "a node=True must be a mapping with a _target_"),
        (None, "a node=null must be a mapping with a _target_"),
        (target(AVERIS, of=5), f"{AVERIS}.of=5 must be a mapping with the _target_ of a LinearRecipe"),
        (target(AVERIS, of={"a": 1}), f"{AVERIS}.of={{'a': 1}} must be a mapping with the _target_ of a LinearRecipe"),
    ],
)
def test_construct_refuses_with_a_value_error(node, message):
    with pytest.raises(ValueError, match=message):
        build.construct(node)


def test_layout_needs_no_memory():
    laid_out = build.layout(composed("+recipe=fp4"))
    assert all(parameter.is_meta for parameter in laid_out.model.parameters())
    assert len(laid_out.phases[0].recipes) == 13


@pytest.mark.parametrize(
    "added",
    [
        (f"+precision.schedule={{late: {{at: 0.5, policy: {BF16}}}}}",),
        (f"+{LATE}={{at: 0.5, policy: {BF16}}}",),
        (f"+{LATE}.at=0.5", f"+{LATE}.policy={BF16}"),
        (f"+{LATE}={{at: 0.5, policy: {BF16}}}", f"{LATE}.forward_only=false"),
        (f"+{LATE}={{at: 0.5, policy: {BF16}, forward_only: 0}}",),
    ],
)
def test_a_phase_is_the_same_however_it_is_added(added):
    """A run is saved with all keys of a phase, which are part of its identity."""
    config.register()
    with initialize_config_dir(str(config.directory()), version_base="1.3"):
        tree = compose("train", overrides=[*SMALL, "+recipe=fp8", "steps=10", *added])
    _, late = build.layout(typed(tree, added)).phases
    assert late.first_step == 5 and all(recipe.is_identity for recipe in late.recipes.values())
    assert OmegaConf.to_container(tree.precision.schedule)["late"] == {
        "at": 0.5,
        "forward_only": False,
        "policy": dict.fromkeys(("blocks.*", "head"), target("lowprec_train.recipes.bf16.recipe")),
        "saved_activations": {},
    }


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (f"{{at: 2.0, policy: {BF16}}}", ": a phase must begin at a fraction of the run between 0 and 1, not at 2.0"),
        (f"{{at: nan, policy: {BF16}}}", ": a phase must begin at a fraction of the run between 0 and 1, not at nan"),
        (f"{{at: noon, policy: {BF16}}}", ".at: Value 'noon' of type 'str' could not be converted to Float"),
        (f"{{policy: {BF16}}}", f".at must be given: {LATE}.at=..."),
        ("{at: 0.5}", f".policy must be given: {LATE}.policy=..."),
        (f"{{at: 0.5, policy: {BF16}, forward_only: 3}}", ".forward_only=3: 3 is neither true nor false"),
        ("{att: 2}", ".att=2: there is no such key; there are at, forward_only, policy, saved_activations"),
        (f"{{at: '${{banana}}', policy: {BF16}}}", ".at: Interpolation key 'banana' not found"),
        ("5", "=5 must be a mapping with at, forward_only, policy, saved_activations"),
        ("null", "=null must be a mapping with at, forward_only, policy, saved_activations"),
    ],
)
def test_phases_that_cannot_be(added, message):
    with pytest.raises(ValueError) as error:
        build.layout(compose_typed(f"+{LATE}={added}"))
    assert str(error.value) == f"{LATE}{message}"


@pytest.mark.parametrize("key", ["model.qkv_bias", "model.tied"])
def test_flags_are_no_numbers(key):
    with pytest.raises(ValueError, match=f"{key}=3: 3 is neither true nor false"):
        compose_typed(f"{key}=3")
    assert compose_typed(f"{key}=1") == compose_typed(f"{key}=true")


def test_weights_depend_on_the_seed_alone():
    first, again, other = (build.layout(composed("+recipe=mxfp4")).model for _ in range(3))
    build.weights(first, CPU, 1)
    build.weights(again, CPU, 1)
    build.weights(other, CPU, 2)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs if a.ndim == 2)
    assert first.blocks[2].mlp.down.site == 3 and all(p.isfinite().all() for p in first.parameters())


def test_overrides_reach_what_quantises():
    (phase,) = build.layout(composed("+recipe=fp4", "precision.override.fprop.outliers=null")).phases
    assert phase.recipes["blocks.0.mlp.down"].fprop.outliers is None and phase.recipes["head"].is_identity
    with pytest.raises(ValueError, match="precision=bf16 quantises nothing"):
        build.layout(composed("precision.override.dgrad.a.format=E4M3"))
    late = "{at: 0.5, policy: {blocks.*: {_target_: lowprec_train.recipes.fp8.recipe}, head: {_target_: %s}}}"
    late %= "lowprec_train.recipes.bf16.recipe"
    first, second = build.layout(
        composed("precision.override.dgrad.a.format=E4M3", f"+precision.schedule.late={late}")
    ).phases
    assert first.recipes["blocks.0.mlp.down"].is_identity
    assert second.recipes["blocks.0.mlp.down"].dgrad.a.format is E4M3


def test_the_policy_must_cover_the_model():
    run = composed("+recipe=fp8")
    del run.precision.policy["head"]
    with pytest.raises(ValueError, match="'head'"):
        build.layout(run)


def test_the_table_and_its_summary():
    laid_out = build.layout(composed("+recipe=fp4"))
    table = describe.effective(laid_out.phases[0].recipes, laid_out.plans(CPU)[0])
    assert table["blocks.2.mlp.gate_up"]["shape"] == [128, 64]
    assert table["blocks.2.mlp.gate_up"]["execution"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), "dequantize")
    assert table["blocks.0.attention.qkv"]["recipe"]["estimator"] == {
        "kind": "DifferentiableEstimator",
        "k": 5.0,
        "cap": 3.0,
        "permuted": False,
    }
    lines = describe.summary(table).splitlines()
    assert len(lines) == 2 * 11  # two kinds of layers: names, three GEMMs with two operands each, the estimator
    assert "blocks.*.mlp.gate_up 128x64 (3 layers)" in lines[0] and lines[11] == "  head 128x64"
    assert lines[1].startswith("    fprop E2M1[1x*]") and lines[1].endswith("[dequantize]")
    assert lines[2] == "      X     fresh, quantize_outliers; saved: codes of the transpose"
    assert lines[3] == "      W     fresh, quantize_both (W and W^T); saved: codes of the transpose"
    scaled = "quantize_both (dY and dY^T), times the row scales of the other operand"
    assert lines[5:7] == [f"      dY    fresh, {scaled}", "      W^T   codes of fprop"]
    assert lines[12] == "    fprop BF16 x BF16 [bf16]" and lines[13] == "      X     not rounded; saved: as it is"


def test_what_a_kernel_beside_a_layer_leaves_is_reported():
    """SwiGLU's op leaves the amax of its result to `down`, and that of its gradient to `gate_up`."""
    laid_out = build.layout(composed("+recipe=coat"))
    (plans,) = laid_out.plans(CPU)
    assert "amax" not in str(plans["blocks.0.mlp.down"].fprop.a)  # rounded inputs, op by op: nothing is left
    (plans,) = build.layout(composed("+recipe=fp8")).plans(CPU)
    down, gate_up = plans["blocks.0.mlp.down"], plans["blocks.0.mlp.gate_up"]
    assert str(down.fprop.a) == "fresh, quantize_both (X and X^T), amax from gated_silu"
    assert gate_up.dgrad.a.amax_from == "gated_silu" and not gate_up.fprop.a.amax_from + down.dgrad.a.amax_from
    assert describe.saved(laid_out.model, laid_out.phases[0].saved_activations, CPU) == {
        "norm": "E4M3[1x16] POW2 by several ops",
        "activation": "E4M3[1x16] POW2 by several ops",
    }


def test_rates_count_every_gemm(caplog):
    """The log says once which of them cannot be given."""
    caplog.set_level(logging.INFO)
    laid_out = build.layout(composed("+recipe=fp8"))
    (plans,) = laid_out.plans(CPU)
    rates = build.throughput(composed("+recipe=fp8", "data.seq_len=256"), laid_out.model, plans, CPU)
    weights = sum(torch.Size(plan.shape).numel() for plan in plans.values())
    attention = 3 * 3 * 2 * (2 * 64) * 128
    assert sum(rates.flops_per_token.values()) == 6 * weights + attention
    assert "no peak FLOP/s known for bf16 on 'cpu': perf/sol and perf/mfu_bf16peak left out" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("groups", "typed", "recipe", "overrides"),
    [
        ({"precision": "bf16"}, [], "bf16", []),
        ({"precision": "bf16"}, ["precision=bf16"], "bf16", []),
        ({"recipe": "fp4", "precision": "fp4"}, ["+recipe=fp4", "optim.lr=1"], "fp4", []),
        ({"recipe": "fp4", "precision": "fp4"}, ["+recipe=fp4", "precision=fp4"], "fp4", []),
        ({"recipe": "mine", "precision": "fp4"}, ["+recipe=mine"], "mine", []),
        (
            {"recipe": "fp4", "precision": "bf16"},
            ["+recipe=fp4", "precision=bf16"],
            "bf16",
            ["precision=bf16 undoes +recipe=fp4"],
        ),
        (
            {"recipe": "fp4", "precision": "fp4"},
            ["+recipe=fp4", "+precision.policy.norm=x", "precision.override.estimator=null"],
            "fp4",
            ["precision.override.estimator=None", "+precision.policy.norm=x"],
        ),
    ],
)
def test_the_choice_of_recipe(groups, typed, recipe, overrides):
    tree = {"estimator": None} if any("override" in argument for argument in typed) else {}
    choice = Choice.of(PrecisionConfig(name=groups["precision"], override=tree), groups, typed)
    assert (choice.recipe, choice.overrides) == (recipe, overrides)
    assert (choice.undone is None) == ("undoes" not in "".join(overrides))


@pytest.mark.parametrize("held", [True, False])
def test_rows_are_written_by_the_process_that_holds_the_run_directory(held, tmp_path):
    run, about = composed("telemetry_interval=1"), SimpleNamespace(steps_done=0)
    with build.rows(run, about, SimpleNamespace(held=held, path=tmp_path)) as write:
        write([{"step": 1}])
    assert (tmp_path / "telemetry.jsonl").exists() == held
