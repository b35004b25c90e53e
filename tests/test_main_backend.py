"""Whole runs whose linear layers TransformerEngine runs: a stand-in for it on the CPU, itself on a GPU."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from lowprec_train.train import build
from lowprec_train.train.weights import open_weights, shapes
from tests import fake_transformer_engine
from tests.launching import launcher
from tests.recipes import composed

SMALL = (
    *("model.layers=2", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=320"),
    *("data=stdlib", "data.vocab_size=320", "data.seq_len=32", "micro_batch=2", "tokens_per_step=128", "steps=6"),
    *("eval_interval=3", "eval_batches=1", "checkpoint_interval=3", "checkpoint_keep=9", "optim.lr=1e-2"),
    *("data.cache=cache", "optim.schedule.warmup_fraction=null", "optim.schedule.warmup_steps=1", "compile=off"),
)
TE, TIMES = "+recipe=te_fp8", ("time/", "perf/", "mem/")
REAL = pytest.param("real", marks=pytest.mark.gpu)


@pytest.fixture(params=["stand-in", REAL])
def library(request, monkeypatch):
    if request.param == "real":
        pytest.importorskip("transformer_engine")
        return "real"
    fake_transformer_engine.make(monkeypatch)
    return "stand-in"


@pytest.fixture
def launch(library, tmp_path, monkeypatch, capfd):
    device = "device=cuda" if library == "real" else "device=cpu"
    return launcher((*SMALL, device), tmp_path, monkeypatch, capfd)


def numbers(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def weights(run):
    opened = open_weights(run)
    return {name: opened.read(name) for name in opened.names()}


@pytest.mark.parametrize("scaling", ["delayed", pytest.param("current", marks=pytest.mark.nightly)])
def test_a_run_learns_and_goes_on_to_the_bit(launch, tmp_path, scaling):
    """Delayed scaling by what the checkpoint holds of its histories: without them the first steps have scales of 1."""
    chosen = (TE, f"+precision/scaling={scaling}")
    assert launch(*chosen, "name=whole")[0] == 0
    whole, cut = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut"
    seen = [line["train/loss"] for line in numbers(whole)]
    assert seen[-1] < seen[0] - 0.2
    shutil.copytree(whole, cut)
    (cut / "DONE").unlink()
    shutil.rmtree(cut / "checkpoints" / "step-6")
    (cut / "checkpoints" / "latest").write_text("step-3\n")
    assert launch(*chosen, "name=cut")[0] == 0
    assert numbers(cut) == numbers(whole)
    theirs = weights(cut)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(whole).items())


def test_evaluation_leaves_histories_alone(launch, tmp_path):
    assert launch(TE, "name=often", "eval_interval=1")[0] == launch(TE, "name=seldom", "eval_interval=6")[0] == 0
    often, seldom = ([line["train/loss"] for line in numbers(tmp_path / "runs" / name)] for name in ("often", "seldom"))
    assert often == seldom


@pytest.mark.nightly
def test_checkpoints_cross(launch, tmp_path):
    """The same names, shapes and first values; a run goes on in fp8, and one of bf16 here."""
    assert launch(TE, "name=te")[0] == launch("+recipe=bf16", "name=bf16")[0] == 0
    te, bf16 = (weights(tmp_path / "runs" / name) for name in ("te", "bf16"))
    assert {name: each.shape for name, each in te.items()} == {name: each.shape for name, each in bf16.items()}
    assert launch("+recipe=fp8", "name=after", "weights=runs/te", "model=from_checkpoint")[0] == 0
    assert launch(TE, "name=before", "weights=runs/bf16", "model=from_checkpoint")[0] == 0
    first = {name: numbers(tmp_path / "runs" / name)[0]["train/loss"] for name in ("te", "bf16", "after", "before")}
    assert first["te"] == pytest.approx(first["bf16"], abs=0.05)
    assert max(first["after"], first["before"]) < first["te"] - 0.2


def test_the_table_says_who_computes(launch, tmp_path, library):
    _, out, _ = launch(TE, "name=te", "+precision/scaling=current", "steps=3")
    run = tmp_path / "runs" / "te"
    about, layers = (json.loads((run / name).read_text()) for name in ("run.json", "recipe.json"))
    assert about["backend"].startswith("TransformerEngine, Float8CurrentScaling(), version 2.")
    assert about["backend_settings"].startswith("recipe_type=Float8CurrentScaling")
    assert about["backend"] in out and "fp8_library 24, bf16 3" in out
    opened = open_weights(run)
    assert {name: opened.shape(name) for name in opened.names()} == shapes(opened.model)  # as of any recipe
    told = (layers.get("linears") or layers)["blocks.0.mlp.down"]
    assert told["gemms"]["fprop"] == "TransformerEngine, Float8CurrentScaling()"
    assert told["execution"]["dgrad"] == "fp8_library" and told["operands"]["wgrad"]["X^T"] == "rounded by the library"


REFUSED = {
    "telemetry_interval=2": "telemetry cannot observe its roundings",
    "model.recompute=full": "would run outside of its pass",
    "model.recompute=selective": "would run outside of its pass",
    "model.full_recompute_layers=1": "would run outside of its pass",
    "precision.override.dgrad.a.format=E4M3": "use the options of",
    "precision/schedule=bf16_end": "has state from earlier steps",
    "+precision/scaling=banana": "banana",
    "model.ffn=72": "multiples of 16",
    "data.seq_len=8 micro_batch=1 tokens_per_step=8": "8 tokens",
}


@pytest.mark.parametrize(("overrides", "says"), REFUSED.items(), ids=REFUSED)
def test_what_it_cannot_do_is_refused_before_a_step(tmp_path, monkeypatch, capfd, overrides, says):
    fake_transformer_engine.make(monkeypatch)
    call = launcher((*SMALL, "device=cpu"), tmp_path, monkeypatch, capfd)
    status, _, err = call(TE, *overrides.split())
    assert status == 1 and says in err and len(err.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()


def test_tensor_parallel_is_refused():
    run = composed(f"{TE}", "parallel.tp=2")
    with pytest.raises(ValueError, match="parallel.tp=2: TransformerEngine, DelayedScaling.* hold whole weights"):
        build.layout(run)


def test_a_cpu_is_refused(tmp_path, monkeypatch, capfd):
    status, _, err = launcher((*SMALL, "device=cpu"), tmp_path, monkeypatch, capfd)(TE)
    assert status == 1 and "needs a CUDA GPU, and this run is on cpu" in err
    assert not (tmp_path / "runs").exists()
