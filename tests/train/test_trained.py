"""A trained model computes what training computed, under the run's recipe of that step and under any other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowprec_train.model.generation import Sampling, generate
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import attach_draws
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.train import build
from lowprec_train.train.trained import Trained
from lowprec_train.train.trainer import EVALUATION_STEP
from tests.recipes import SYSTEMS, by_day, composed, system
from tests.saved import save

CPU = torch.device("cpu")
RECIPES = SYSTEMS
TOKENS = torch.randint(0, 64, (16, 65), generator=torch.Generator().manual_seed(3))


def loss(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.loss(TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous(), 1.0)


@pytest.mark.parametrize("recipe", by_day(RECIPES))
def test_the_forward_pass_is_that_of_training(tmp_path, recipe):
    trained = system(recipe)
    run = save(tmp_path / "run", trained.run, trained.model, 1)
    attach_draws(trained.model, trained.seeds.at(EVALUATION_STEP, 0))
    again = Trained(run).model("run", device=CPU)
    assert torch.equal(loss(again), loss(trained.model))
    linears = [module for module in again.modules() if isinstance(module, Linear)]
    assert {linear.weight.dtype for linear in linears} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert len(list(generate(again, [1, 2, 3], max_tokens=2, sampling=Sampling()))) == 2  # one token at a time, too


def test_any_recipe_and_precision_of_the_same_weights(tmp_path):
    trained = system("fp4")
    source = Trained(save(tmp_path / "run", trained.run, trained.model, 1, recipe="fp4"))
    losses = {name: float(loss(source.model(name, device=CPU))) for name in ("run", "fp4", "bf16", "fp8")}
    assert losses["run"] == losses["fp4"] and len(set(losses.values())) == 3
    exact = float(loss(source.model("bf16", device=CPU, dtype=torch.float32)))
    assert float(loss(source.model("fp32", device=CPU))) == exact and source.recipe_name("fp32") == "fp32"
    assert abs(losses["bf16"] - exact) < 1e-4 * exact and losses["bf16"] != exact
    assert source.recipe_name("run") == "fp4" and source.recipe_name("fp8") == "fp8" and source.step == 1


def test_recipes_that_compute_alike_are_equal(tmp_path):
    trained = system("mxfp4")  # its forward pass is BF16
    source = Trained(save(tmp_path / "run", trained.run, trained.model, 1))
    assert source.forward("run") == source.forward("bf16") != source.forward("fp8")


def test_the_recipe_is_that_of_the_checkpoint_s_step(tmp_path):
    run = composed(
        "+recipe=fp4",
        "precision/schedule=bf16_end",
        "precision.schedule.end.at=0.5",
        "steps=10",
        "model.layers=2",
        "model.vocab_size=64",
        "model.max_seq_len=64",
        "data.seq_len=64",
    )
    model = build.layout(run).model
    build.weights(model, CPU, 0)
    path = save(tmp_path / "run", run, model, 1, 5, 6, 10)
    fp4, bf16 = Trained(path).forward("fp4"), Trained(path).forward("bf16")
    assert fp4 != bf16
    assert [Trained(path, step).forward("run") == fp4 for step in (1, 5, 6, 10)] == [True, True, False, False]
    assert Trained(path).forward("run") == bf16  # the newest checkpoint
    assert Trained(path / "checkpoints" / "step-5").forward("run") == fp4
    schedule = PrecisionSchedule(build.phases(run, model))
    assert [phase.first_step for phase in schedule.phases] == [0, 5]


def test_a_cache_leaves_the_tokens_of_row_scaled_recipes(tmp_path):
    trained = system("fp4")
    model = Trained(save(tmp_path / "run", trained.run, trained.model, 1)).model("run", device=CPU, dtype=torch.float32)
    expected = [5, 9, 2]
    for _ in range(12):
        expected.append(int(model.logits(torch.tensor([expected]))[0, -1].argmax()))
    assert list(generate(model, expected[:3], max_tokens=12, sampling=Sampling())) == expected[3:]


def test_refusals(tmp_path):
    trained = system("bf16")
    source = Trained(save(tmp_path / "run", trained.run, trained.model, 1))
    with pytest.raises(ValueError, match="recipe 'fp3' is not one of run, averis, bf16"):
        source.forward("fp3")
    with pytest.raises(ValueError, match="fp32 computes in torch.float32, not in torch.bfloat16"):
        source.model("fp32", device=CPU, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="step-7"):
        Trained(tmp_path / "run", 7)
    with pytest.raises(ValueError, match="neither"):
        Trained(tmp_path)
    narrow = dataclasses.replace(trained.run.model, ffn=200)
    with torch.device("meta"):
        model = build.layout(dataclasses.replace(trained.run, model=narrow)).model
    build.weights(model, CPU, 0)
    narrow_run = dataclasses.replace(trained.run, model=narrow)
    with pytest.raises(ValueError, match="mlp.gate_up.fprop .*400"):
        Trained(save(tmp_path / "narrow", narrow_run, model, 1)).forward("fp8_block")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_computes_it_token_by_token_too(tmp_path, recipe):
    trained = system(recipe)
    source = Trained(save(tmp_path / "run", trained.run, trained.model, 1))
    cuda = torch.device("cuda", 0)
    here, there = source.model("run", device=CPU), source.model("run", device=cuda)
    with torch.no_grad():
        close = there.loss(TOKENS[:, :-1].to(cuda).contiguous(), TOKENS[:, 1:].to(cuda).contiguous(), 1.0)
        assert abs(float(close) / float(loss(here)) - 1) < 2e-3
        tokens, cache = TOKENS[:1, :24].to(cuda), there.new_cache(1, 24)
        parts = [there.head(there.hidden(part, cache=cache)) for part in tokens.split((9, *(1,) * 15), dim=1)]
        whole = there.logits(tokens).float()
        assert (torch.cat(parts, dim=1).float() - whole).norm() < 0.2 * whole.norm()  # scales of a tensor differ
    assert len(list(generate(there, [1, 2, 3], max_tokens=5, sampling=Sampling()))) == 5
