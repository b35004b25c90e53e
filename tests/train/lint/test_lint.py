"""Every rule of the start-up linter has a run that it stops or warns of; what ships is free of errors."""

from __future__ import annotations

import re

import pytest
import torch

from lowprec_train import config
from lowprec_train.config import PhaseConfig
from lowprec_train.optim.codecs import expanded, plain, scaled
from lowprec_train.precision import gemm
from lowprec_train.train import build
from lowprec_train.train.lint import rules as lint
from lowprec_train.train.lint import training as lint_training
from lowprec_train.train.lint.rules import Report, Severity
from tests.optim.cases import Quadratic
from tests.recipes import SYSTEMS, by_day, composed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OVER = "precision.override."
CASES = {
    "floor-clips": ("+recipe=mxfp4", f"{OVER}dgrad.a.rounding=nearest"),
    "ceil-headroom": ("+recipe=fp4_mixed", f"{OVER}fprop.a.headroom=0.75"),
    "scale-per-step": ("+recipe=fp8_block", f"{OVER}dgrad.a.tile=[128,1]"),
    "stochastic-forward": ("+recipe=fp8", f"{OVER}fprop.a.rounding=stochastic"),
    "nearest-gradient": ("+recipe=nvfp4", f"{OVER}wgrad.a.rounding=nearest"),
    "unclamped-tokens": ("+recipe=fp4", f"{OVER}fprop.outliers=null"),
    "idle-clamp": ("+recipe=fp4", f"{OVER}fprop.outliers.quantile=0.999"),
    "e5m2-forward": ("+recipe=fp8", f"{OVER}fprop.a.format=E5M2"),
    "int8-wgrad": ("+recipe=fp8", f"{OVER}wgrad.a.format=INT8"),
    "fp32-tensor-scale": ("+recipe=fp8", f"{OVER}dgrad.a.scale=FP32"),
    "quantised-head": ("+recipe=fp8", "precision.policy.head._target_=lowprec_train.recipes.fp8.recipe"),
    "dge-scale": ("+recipe=fp4", f"{OVER}fprop.b.scale=POW2"),
    "short-rotation": ("+recipe=mxfp4", f"{OVER}wgrad.rotation.block=16"),
    "four-bit-end": ("+recipe=fp8", "precision.policy={blocks.*: {_target_: RECIPES.nvfp4.recipe}}"),
}  # fmt: skip
CASES_ON_GPU = {
    "e5m2-pair": ("+recipe=fp8", f"{OVER}fprop.b.format=E5M2"),
    "unfolded-blocks": ("+recipe=mxfp4", f"{OVER}dgrad.b.exponent_span=0"),
    "unaligned-fp8": ("+recipe=fp8", "data.seq_len=264", "micro_batch=1", "tokens_per_step=264"),
    "fast-backward": ("+recipe=fp8", f"{OVER}wgrad.split_accumulation=false"),
    "twice-rounded": ("+recipe=fp8_block", f"{OVER}fprop.a.scale=FP32"),
    "small-gemm": ("+recipe=fp8",),
}
CASES_OF_TRAINING = {
    "fp8-second-moment": ("optim/moment@optim.second_moment=e4m3",),
    "stalled-moments": ("+recipe=coat", "optim.beta2=0.999"),
    "lost-updates": ("optim/master=fp16_nearest", "optim.lr=2e-5"),
    "two-clips": ("+recipe=int8_switchback", "max_grad_norm=1.0"),
}
ERRORS = {"floor-clips", "ceil-headroom", "scale-per-step", "fp8-second-moment"}
BF16_SPEED = {"nvfp4", "averis", "quartet2", "mxfp8", "ufp4"}  # block scales do not fold (docs/recipes/)
SMALL = {"gpt_125m", "gpt_345m", "gpt_tiny", "llama_130m", "llama_20m", "llama_350m", "llama_tiny"}
SMALL |= {"qwen2_5_0b5", "qwen3_0b6"}


@pytest.fixture
def fp8_gpu(monkeypatch):
    """The paths of a GPU with FP8 tensor cores, on any machine."""
    monkeypatch.setattr(gemm, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)


def report(run: config.RunConfig, device: torch.device = CPU) -> Report:
    laid_out = build.layout(run)
    plans = laid_out.plans(device)
    return lint.examine(build.plan(run, laid_out, plans, device), build.LINT_RULES, allow=run.lint_allow)


def command(*overrides: str) -> config.RunConfig:
    return composed(*(text.replace("RECIPES.", "lowprec_train.recipes.") for text in overrides))


def names(found: Report, severity: Severity | None = None) -> set[str]:
    return {finding.rule for finding in found.findings if severity in (None, finding.severity)}


def test_every_rule_is_here():
    assert [rule.name for rule in build.LINT_RULES] == [*CASES, *CASES_ON_GPU, *CASES_OF_TRAINING]
    assert {rule.name for rule in build.LINT_RULES if rule.severity is Severity.ERROR} == ERRORS


@pytest.mark.parametrize("rule", build.LINT_RULES, ids=lambda rule: rule.name)
def test_every_rule_names_its_source(rule):
    assert re.search(r"arXiv \d{4}\.\d{5}|\w+/[\w-]+#\d+|docs/", rule.why)
    assert rule.instead and not rule.why.endswith(".")


@pytest.mark.parametrize("rule", [*CASES, *CASES_OF_TRAINING])
def test_a_rule_finds_its_fault(rule):
    assert rule in names(report(command(*(CASES | CASES_OF_TRAINING)[rule])))


@pytest.mark.parametrize("recipe", ["fp4_fold", "quartet2"])
def test_factors_want_a_rotation(recipe):
    """Codes to nearest under a factor have no bias behind a rotation alone, drawn scales or not."""
    assert "nearest-gradient" not in names(report(command(f"+recipe={recipe}")))
    assert "nearest-gradient" in names(report(command(f"+recipe={recipe}", f"{OVER}dgrad.rotation=null")))


@pytest.mark.parametrize("rule", CASES_ON_GPU)
def test_a_rule_for_gpus_finds_its_fault_there(fp8_gpu, rule):
    run = command(*CASES_ON_GPU[rule])
    assert rule in names(report(run, GPU)) and rule not in names(report(run))


@pytest.mark.parametrize("recipe", by_day(config.choices("recipe")))
def test_what_ships_is_sound(fp8_gpu, recipe):
    """No finding on a CPU; on a GPU, block scales that run at BF16 speed and models too small to gain, no others."""
    run = composed(f"+recipe={recipe}")
    for model in config.choices("model"):
        run.model = composed(f"model={model}").model
        run.model.layers = 3
        assert not report(run).findings, model
        one_block = recipe == "fp8_block" and run.model.dim == 128  # a row of X, one block long, meets squares of W
        slow = {"unfolded-blocks"} if recipe in BF16_SPEED or one_block else set()
        slow |= {"twice-rounded"} if recipe == "ufp4" else set()
        on_fp8 = recipe not in BF16_SPEED | {"bf16", "int8_switchback", "reduced_mantissa"}
        assert names(report(run, GPU)) == slow | ({"small-gemm"} if model in SMALL and on_fp8 else set()), model


@pytest.mark.parametrize("schedule", config.choices("precision/schedule"))
def test_schedules_that_ship_are_sound(schedule):
    recipes = [r for r in SYSTEMS if r != "bf16"]
    assert not [
        found for r in recipes for found in report(composed(f"+recipe={r}", f"precision/schedule={schedule}")).findings
    ]


def test_a_later_phase_is_looked_at():
    run = composed()
    run.precision.schedule["late"] = PhaseConfig(at=0.5, policy={"*": {"_target_": "lowprec_train.recipes.fp8.recipe"}})
    assert names(report(run)) == {"quantised-head"}


def test_a_finding_says_what_where_why_and_what_to_do():
    (finding,) = report(composed("+recipe=mxfp4", f"{OVER}wgrad.rotation.block=16")).findings
    text = str(finding)
    assert finding.what == (
        "wgrad = a rotation of 16 over scale blocks of 32 in blocks.*.attention.qkv, blocks.*.attention.out, "
        "blocks.*.mlp.gate_up, blocks.*.mlp.down"
    )
    assert "arXiv 2502.20586" in text and "Instead: a rotation that is a multiple" in text
    assert "lint_allow=[short-rotation]" in text


def test_all_errors_are_in_one_message():
    run = composed("+recipe=mxfp4", f"{OVER}dgrad.a.rounding=nearest", f"{OVER}wgrad.a.tile=[32,1]")
    with pytest.raises(ValueError) as refused:
        lint.refuse(report(run))
    lines = str(refused.value).splitlines()
    assert lines[0] == "the start-up linter refuses this run:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["floor-clips", "scale-per-step"]
    assert "dgrad.a = E2M1[1x32] E8M0_FLOOR in blocks.*.attention.qkv" in lines[1]


def test_a_rule_can_be_waived_by_name():
    run = composed("+recipe=mxfp4", f"{OVER}dgrad.a.rounding=nearest", "lint_allow=[floor-clips]")
    found = report(run)
    lint.refuse(found)
    assert found.overrides == ["lint_allow=floor-clips"] and not found.errors
    assert found.lines[0].startswith("waived by lint_allow: floor-clips: dgrad.a = E2M1[1x32] E8M0_FLOOR")
    assert {f["rule"]: f["waived"] for f in found.facts} == {"floor-clips": True, "nearest-gradient": False}
    assert report(composed("lint_allow=[floor-clips]")).overrides == []  # nothing to waive
    with pytest.raises(ValueError, match="lint_allow: 'nothing' is not a rule; the rules are floor-clips, "):
        report(composed("lint_allow=[nothing]"))


def test_a_clamp_that_has_outliers_is_not_idle():
    run = composed("+recipe=fp4", "model=llama_7b", "model.layers=1", f"{OVER}fprop.outliers.quantile=0.999")
    assert not report(run).findings


@pytest.mark.parametrize(
    ("scale", "headroom", "clips"),
    [("E8M0_FLOOR", 1.0, True), ("E8M0_FLOOR", 0.8, True), ("E8M0_FLOOR", 0.75, False), ("E8M0_CEIL", None, False)],
)
def test_when_the_floor_rule_clips(scale, headroom, clips):
    """The rule's bound is the format's: what it calls clipping saturates, what it lets pass does not."""
    share = "null" if headroom is None else headroom
    changes = (f"{OVER}dgrad.a.scale={scale}", f"{OVER}dgrad.a.headroom={share}", f"{OVER}dgrad.a.rounding=nearest")
    run = composed("+recipe=mxfp4", *changes)
    quantizer = build.layout(run).phases[0].recipes["blocks.0.mlp.down"].dgrad.a
    x = torch.linspace(4.0, 7.9, 32).repeat(1, 1)
    assert (x.max() / quantizer(x).scale > 6).item() == clips
    assert ("floor-clips" in names(report(run))) == clips


@pytest.mark.parametrize("codec", [scaled("E4M3"), scaled("FP16"), plain("BF16")], ids=str)
def test_where_a_moment_stalls(codec):
    """At the coarsest place of a binade a decay below the rule's bound leaves a code as it is, one above does not."""
    least = lint_training.half_step(codec, 1.0)
    coarsest = 1 + 1 / (1 / (2 * least) - 1)  # the first number above 1
    m = torch.full((2, 8), coarsest)
    for beta, stays in ((1 - 0.98 * least, True), (1 - 1.02 * least, False)):
        kept = codec.decode(codec.encode(m * beta))
        assert torch.equal(codec.decode(codec.encode(m)), m) and torch.equal(kept, m) == stays


@pytest.mark.parametrize(("beta2", "share"), [(0.95, 0.63), (0.99, 0.92), (0.999, 0.94)])
def test_how_many_codes_of_a_second_moment_stay(beta2, share):
    """COAT's, of lognormal magnitudes: at .95 six in ten, which ships, at .99 nine in ten, which is told."""
    codec = expanded("E4M3", 128)
    assert lint_training.unmoved(codec, beta2) == pytest.approx(share, abs=0.03)
    told = [str(f) for f in report(composed("+recipe=coat", f"optim.beta2={beta2}")).findings]
    wanted = (
        rf"stalled-moments: beta2={beta2} with E4M3 expanded.*leaves {lint_training.unmoved(codec, beta2):.0%} of its"
    )
    assert bool(told) == (beta2 >= 0.99) and all(re.match(wanted, each) for each in told)
    assert lint_training.unmoved(plain("FP32"), beta2) == 0.0


def test_what_nearest_masters_lose_on_a_quadratic():
    """Weights of .02 at a peak of 3e-5, the rule's case: the loss 92 % above FP32 masters', stochastically 7 %."""
    problem = Quadratic(shape=(8, 128), noise=3e-4)
    generator = torch.Generator().manual_seed(5)
    problem.start = torch.randn(8, 128, generator=generator) * lint_training.WEIGHT
    problem.goal = problem.start + torch.randn(8, 128, generator=generator) * 3e-3
    exact, nearest, stochastic = (
        problem.loss(problem.descend(("fp32", "fp32", master), steps=400, peak=3e-5))
        for master in ("fp32", "fp16_nearest", "fp16")
    )
    assert 1.6 < nearest / exact < 2.3 and 1.0 < stochastic / exact < 1.15
    told = report(composed("optim/master=fp16_nearest", "optim.lr=3e-5")).findings
    assert [f.rule for f in told] == ["lost-updates"] and told[0].what.startswith(
        "optim.lr=3e-05, a learning rate below 2"
    )


def test_where_an_update_is_lost():
    """An FP16 master of typical weights keeps them under the rule's rate, and moves all of them at eight times that."""
    least = lint_training.WEIGHT * lint_training.HALF_STEP
    w = torch.full((2, 8), lint_training.WEIGHT)
    w[0, 0] = 0.1  # of a matrix: the scale follows its largest weight
    master = scaled("FP16")

    def kept(update):
        before = master.decode(master.encode(w))
        return torch.equal(master.decode(master.encode(before + update)), before)

    assert kept(0.9 * least) and not kept(8 * least)
    assert not report(composed("optim/master=fp16_nearest")).findings
    assert not report(composed("optim/master=fp16", "optim.lr=2e-5")).findings
