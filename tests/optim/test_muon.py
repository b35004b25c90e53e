"""Muon against torch's own, its shards against the whole, and what it leaves to AdamW."""

import pytest
import torch
from torch import nn

from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import FP32
from lowprec_train.optim.codecs import Codecs
from lowprec_train.optim.muon import Muon, orthogonalised
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.train import build_optimizer
from lowprec_train.train.checkpoint import Checkpointer, ModelState, OptimizerState
from tests.optim.cases import MASTERS, MOMENTS, equal, fill, tensors
from tests.optim.shards import Cut, differences, gradients, together
from tests.optim.shards import tensors as of_shards
from tests.recipes import composed, system

NAMES = ("weight", "wide", "low")


def muon(parameters, momentum="fp32", master="fp32", shards=None, **options):
    codecs = Codecs(moments=(MOMENTS[momentum], FP32), master=MASTERS[master])
    return CodedOptimizer(parameters, Muon(**options), codecs, lr=1e-2, seed=5, shards=shards)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (24, 96)])
def test_it_is_torchs(shape, nesterov, adjust_lr):
    """Ten steps with decay, within half a step of BF16 of the weights' way: momenta are rounded once more or less."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator) * 0.1
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = muon([mine], nesterov=nesterov, adjust_lr=adjust_lr)
    given = {"lr": 1e-2, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr}
    reference = torch.optim.Muon([theirs], **given)
    for _ in range(10):
        gradient = torch.randn(shape, generator=generator)
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        ours.step(), reference.step()
    far = (theirs - start).norm()
    assert far > 0.1 and (mine - theirs).norm() < 2.0**-8 * far


def test_singular_values_come_near_one():
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(x, 5))
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.equal(orthogonalised(x.t().contiguous(), 5), orthogonalised(x, 5).t())


def test_no_gradient_is_no_direction():
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = muon([weight])
    weight.grad = torch.zeros(4, 8)
    optimizer.step()
    assert torch.equal(weight, torch.full((4, 8), 1 - 1e-2 * 0.1))


def run(parameters, optimizer, given):
    history = [of_shards(parameters, optimizer)]
    for step, found in enumerate((0.0, 0.0, 1.0, 0.0)):
        for name, parameter in parameters.items():
            parameter.grad = given(name, gradients(step)[name]).clone()
        optimizer.step(grad_scale=torch.tensor(3.0), found_inf=torch.tensor(found))
        history.append(of_shards(parameters, optimizer))
    return history


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(("momentum", "master"), [("fp32", "fp32"), ("bf16", "bf16"), ("e4m3", "fp16")])
def test_shards_are_those_of_the_whole(momentum, master, layout):
    """Weights, momenta, codes and scales after every step; one is skipped, some shards are empty."""
    generator, cut = torch.Generator().manual_seed(1), Cut(*layout)
    first = {
        name: torch.randn(shape, generator=generator) for name, shape in (("weight", (37, 128)), ("wide", (6, 2048)))
    }
    first["low"] = torch.randn(3, 64, generator=generator)
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in first.items()}
    optimizer = muon(list(parameters.values()), momentum, master)
    wanted = run(parameters, optimizer, lambda _, whole: whole)
    along = {name: optimizer.along(parameter, tuple(parameter.shape)) for name, parameter in parameters.items()}

    def work(rank):
        mine = {name: nn.Parameter(cut.part(name, rank, first[name])) for name in NAMES}
        shards = {mine[name]: cut.shard(name, rank) for name in NAMES}
        return run(mine, muon(list(mine.values()), momentum, master, shards), lambda name, x: cut.part(name, rank, x))

    histories = cut.on_threads(work)
    for step, whole in enumerate(wanted):
        assert not differences(together(cut, [each[step] for each in histories], along, whole), whole), step


@pytest.mark.parametrize("model", ["llama_tiny", "gpt_tiny"])
def test_hidden_matrices_alone_are_its_own(model):
    made = system("bf16", model, "optim=muon")
    kept = {name: set(made.optimizer.state[p]) - {"step"} for name, p in made.model.named_parameters()}
    hidden = {name for name, parameter in made.model.named_parameters() if name[:6] == "blocks" and parameter.ndim == 2}
    assert hidden and all(kept[name] == {"momentum"} for name in hidden)
    assert all(kept[name] == {"exp_avg", "exp_avg_sq"} for name in kept.keys() - hidden)
    rules = {type(group["rule"]) for group in made.optimizer.param_groups}
    assert rules == {Muon, AdamWRule}


@pytest.mark.parametrize("momentum", ["fp32", "e4m3"])
def test_resume_is_bit_for_bit(momentum, tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Embedding(24, 48), nn.LayerNorm(48), nn.Linear(48, 40))
        codecs = Codecs(moments=(MOMENTS[momentum], FP32))
        return net, CodedOptimizer(parameter_groups(net, 0.1, Muon()), codecs=codecs, lr=1e-2)

    def advance(net, optimizer, steps):
        for step in steps:
            fill(net, step)
            optimizer.step()

    def parts(net, optimizer):
        return {"model": ModelState(net), "optimizer": OptimizerState(net, optimizer)}

    whole, first, second = made(1), made(1), made(2)
    advance(*whole, range(6))
    advance(*first, range(3))
    saver = Checkpointer(tmp_path, interval=1, keep=1)
    saver.save(parts(*first), 3, wait=True)
    assert saver.load(parts(*second)) == 3
    advance(*second, range(3, 6))
    assert equal(tensors(*second), tensors(*whole))


def test_the_configuration_reaches_the_rule():
    run = composed("optim=muon", "optim.rule.momentum=0.9", "optim.rule.adjust_lr=original", "optim.beta2=0.97")
    assert build_optimizer.rules(run) == (Muon(momentum=0.9, adjust_lr="original"), AdamWRule(beta2=0.97))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"momentum": 1.0}, "momentum.*1.0"), ({"iterations": 0}, "iterations.*0"), ({"adjust_lr": "none"}, "'none'")],
)
def test_mistakes_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Muon(**options)
