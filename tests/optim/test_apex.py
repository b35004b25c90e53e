"""AdamW by apex's kernel, of which a stand-in computes here what multi_tensor_adam_capturable computes on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from lowprec_train import nvidia
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.optim import apex
from lowprec_train.optim.codecs import Codecs, scaled
from lowprec_train.optim.in_backward import UpdatesInBackward
from lowprec_train.optim.muon import Muon
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.train.launch import ALONE
from tests.launching import launcher
from tests.parallel.runs import MICRO, SEQ, SUMS, TINY, built
from tests.recipes import composed
from tests.test_main_backend import SMALL
from tests.train.standins import bits, same

CPU = torch.device("cpu")
TOKENS = 2 * MICRO * SEQ
BOTH = ("optim.in_backward=true", f"{SUMS}=fp32")


def kernel(chunk, skip, lists, lr, beta1, beta2, eps, step, mode, corrected, decay, inverse_scale):
    """csrc/multi_tensor_adam.cu, `AdamCapturableFunctor`, one tensor after the other."""
    assert (skip.dtype, step.dtype, mode, corrected) == (torch.int32, torch.int32, 1, 1) and chunk == 65536
    assert {each.dtype for some in lists for each in some} == {torch.float32} == {lr.dtype, inverse_scale.dtype}
    if skip.item() == 1:
        return
    for g, p, m, v in zip(*lists, strict=True):
        g = g * inverse_scale
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * p
        p.copy_(p - lr * update)


@pytest.fixture
def library(monkeypatch):
    def applier(op, skip, lists, *arguments):
        return op(65536, skip, lists, *arguments)

    monkeypatch.setattr(nvidia, "apex_adam", lambda: (applier, kernel))


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 16), (16,), (4, 4))]


def trained(optimizer, own, steps=5):
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        for each in own:
            each.grad = torch.randn(each.shape, generator=generator)
        skipped = torch.tensor(1.0 if index == 2 else 0.0)
        optimizer.set_lr(1e-2 * (index + 1))
        optimizer.step(grad_scale=torch.tensor(1.5), found_inf=skipped)
    return own


def test_it_steps_as_our_adamw_does(library):
    """Clipping, decay, a skipped step and the learning rate among it; to the rounding of 1 / grad_scale."""
    rule = AdamWRule(beta1=0.9, beta2=0.95, eps=1e-8)
    made = {}
    for backend in ("own", "apex"):
        own = parameters()
        optimizer = CodedOptimizer(own, rule, lr=1e-2, weight_decay=0.1, backend=backend)
        made[backend] = trained(optimizer, own), optimizer
    for ours, theirs in zip(*(each for each, _ in made.values()), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2e-6, atol=2e-7)
    states = [list(optimizer.state.values()) for _, optimizer in made.values()]
    for ours, theirs in zip(*states, strict=True):
        assert ours.keys() == theirs.keys() and ours["step"] == theirs["step"] == 4.0
        torch.testing.assert_close(theirs["exp_avg_sq"], ours["exp_avg_sq"], rtol=2e-6, atol=1e-7)


def test_a_skipped_step_leaves_every_bit(library):
    own = parameters()
    optimizer = CodedOptimizer(own, lr=1e-2, backend="apex")
    before = [each.detach().clone() for each in own]
    for each in own:
        each.grad = torch.full_like(each, float("nan"))
    optimizer.step(found_inf=torch.ones(()))
    assert all(torch.equal(a, b) for a, b in zip(before, own, strict=True))
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("rule", "codecs", "says"),
    [
        (AdamWRule(clip_updates=True), Codecs(), "without update clipping"),
        (Muon(), Codecs(), "without update clipping"),
        (AdamWRule(), Codecs(moments=(scaled("E4M3"), scaled("FP16"))), "in FP32, not as E4M3"),
        (AdamWRule(), Codecs(), "needs a CUDA GPU, and this run is on cpu"),
    ],
)
def test_what_it_cannot_do_is_refused(library, rule, codecs, says):
    with pytest.raises(ValueError, match=says):
        apex.check(rule, codecs, CPU)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("optim=apex_adamw", "optim.backend=apex needs a CUDA GPU"),
        ("optim=apex_adamw optim/moment@optim.first_moment=bf16", "keeps moments and weights in FP32"),
        ("optim.backend=banana", "optim.backend='banana' is not one of own, apex"),
        ("model.norm_backend=apex", "model.norm_backend=apex needs a CUDA GPU"),
        ("model.norm_backend=banana", "unknown norm_backend 'banana'"),
    ],
)
def test_a_run_is_refused_before_a_step(tmp_path, monkeypatch, capfd, overrides, says):
    status, _, err = launcher((*SMALL, "device=cpu"), tmp_path, monkeypatch, capfd)(*overrides.split())
    assert status == 1 and says in err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "overrides",
    [("optim.offload=true",), ("optim.in_backward=true",), (f"{SUMS}=fp32",), ("optim.offload=true", *BOTH)],
    ids=" ".join,
)
def test_what_saves_memory_changes_no_bit(library, monkeypatch, overrides):
    """States on the host, updates inside of the backward pass, sums of gradients that are freed; two micro-batches."""
    monkeypatch.setattr(apex, "check", lambda *arguments: None)
    found = []
    for more in ((), overrides):
        run = composed("+recipe=bf16", *TINY, "max_grad_norm=0", "optim=apex_adamw", f"tokens_per_step={TOKENS}", *more)
        trainer = built(run, ALONE, torch.bfloat16)
        losses = [float(trainer.step()["train/loss"]) for _ in range(3)]
        found.append((losses, bits(trainer)))
    assert found[0][0] == found[1][0] and len(set(found[0][0])) == 3 and same(found[0][1], found[1][1])


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_parameter_that_is_skipped_alone_counts_its_own_steps(library, together):
    """Under optim.in_backward: the kernel takes one count for all tensors of a launch, and each has a launch, even if
    they are updated together.
    """
    found = {}
    for backend in ("own", "apex"):
        own = parameters()
        optimizer = CodedOptimizer(own, AdamWRule(), lr=1e-2, backend=backend)
        updates = UpdatesInBackward(optimizer, own, [own] if together else ())
        for step in range(3):
            loss = sum((each.square().sum() for each in own), torch.zeros(()))
            if step == 1:
                loss = loss + own[0][0, 0] * float("inf")
            updates.begin(torch.zeros(()))
            loss.backward()
        assert [float(optimizer.state[each]["step"]) for each in own] == [2.0, 3.0, 3.0]
        found[backend] = own
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=2e-6, atol=2e-7)


def test_a_checkpoint_resumes_under_either(library, tmp_path, monkeypatch, capfd):
    """The states have the same names; only the identity of the run tells them apart, which `weights=` does not ask."""
    monkeypatch.setattr(apex, "check", lambda *arguments: None)
    launch = launcher((*SMALL, "device=cpu"), tmp_path, monkeypatch, capfd)
    assert launch("optim=apex_adamw", "optim.lr=1e-2", "name=apex")[0] == launch("name=own")[0] == 0
    lines = {
        name: [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("own", "apex")
    }
    for ours, theirs in zip(lines["own"], lines["apex"], strict=True):
        assert theirs["train/loss"] == pytest.approx(ours["train/loss"], abs=2e-3)
