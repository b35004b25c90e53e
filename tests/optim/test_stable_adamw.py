"""Update clipping against StableAdamW's equations (arXiv 2304.13013, algorithm 2) in FP64."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.updates import Rule, Step, root_mean
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from tests.optim.cases import adamw
from tests.recipes import composed

B1, B2, EPS = 0.9, 0.99, 1e-8


def pair(value, **options):
    weight = torch.nn.Parameter(value.clone())
    return weight, adamw([weight], lr=1e-2, betas=(B1, B2), eps=EPS, **options)


def gradients(steps, shape=(8, 16), spike=None):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=generator) for _ in range(steps)]
    return [g * (100.0 if step == spike else 1.0) for step, g in enumerate(drawn)]


def oracle(start, drawn, lr, decay):
    """FP64: w, and the rates of all steps."""
    w, m, v, rates = start.double(), 0.0, 0.0, []
    for t, g in enumerate((g.double() for g in drawn), start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        debiased_m, debiased_v = m / (1 - B1**t), v / (1 - B2**t)
        rms = (g * g / debiased_v.clamp_min(EPS**2)).mean().sqrt()
        rates.append(lr / max(1.0, rms.item()))
        w = w - rates[-1] * (decay * w + debiased_m / (debiased_v.sqrt() + EPS))
    return w, rates


def update_rms(gradient, v, eps, count, beta2=B2):
    """RMS of the update from a new second moment."""
    rule = AdamWRule(beta1=B1, beta2=beta2, eps=eps, clip_updates=True)
    step = Step(lr=1e-2, weight_decay=0.0, count=torch.tensor(float(count)))
    return root_mean(rule.squares({"exp_avg_sq": v}, gradient, step), gradient.numel())


def step(weight, optimizer, gradient):
    weight.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-8])
def test_the_published_equations(size):
    """Also where v' lies between eps^2 and eps, and around eps^2."""
    drawn = [gradient * size for gradient in gradients(30, spike=20)]
    weight, optimizer = pair(gradients(1)[0], weight_decay=0.1, clip_updates=True)
    for gradient in drawn:
        step(weight, optimizer, gradient)
    wanted, rates = oracle(gradients(1)[0], drawn, 1e-2, 0.1)
    torch.testing.assert_close(weight.double(), wanted, rtol=2e-5, atol=1e-7)
    assert min(rates) < 1e-2 / 3 and all(rate <= 1e-2 for rate in rates)


def test_the_rate_never_grows():
    """lr_t <= lr: without decay no weight moves further than AdamW would move it from the same state."""
    drawn = gradients(25, spike=10)
    clipped = pair(drawn[0], weight_decay=0.0, clip_updates=True)
    plain = pair(drawn[0], weight_decay=0.0, fused=False)
    for gradient in drawn:
        before = clipped[0].detach().clone()
        plain[0].data.copy_(before)
        step(*clipped, gradient), step(*plain, gradient)
        assert ((clipped[0] - before).abs() <= (plain[0] - before).abs()).all()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_adamw_while_the_rms_is_at_most_one(decay):
    """I7.4, bit for bit: gradients that fade, a quarter of them zero."""
    base = gradients(1)[0]
    base[:, ::4] = 0
    clipped, plain = pair(base, weight_decay=decay, clip_updates=True), pair(base, weight_decay=decay, fused=False)
    for t in range(30):
        gradient = base * 0.9**t
        step(*clipped, gradient), step(*plain, gradient)
        assert torch.equal(clipped[0], plain[0])
    step(*clipped, base * 100), step(*plain, base * 100)
    assert not torch.equal(clipped[0], plain[0])


def test_a_spike_of_100_divides_the_rate_by_9_95():
    """I7.4: RMS = c / sqrt(b2 + (1 - b2) c^2) -> min(c, 1 / sqrt(1 - b2))."""
    sign = gradients(1)[0].sign()
    clipped, plain = pair(sign, weight_decay=0.0, clip_updates=True), pair(sign, weight_decay=0.0, fused=False)
    for weight, optimizer in (clipped, plain):
        optimizer.state[weight]["step"].fill_(5000.0)
        optimizer.state[weight]["exp_avg"].copy_(sign)
        optimizer.state[weight]["exp_avg_sq"].fill_(1.0)
    before = clipped[0].detach().clone()
    step(*clipped, sign * 100), step(*plain, sign * 100)
    ratio = (plain[0] - before) / (clipped[0] - before)
    expected = 100 / math.sqrt(B2 + (1 - B2) * 100**2)
    assert expected == pytest.approx(9.951, abs=1e-3)
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("jump", "expected"), [(1.0, 1.0), (3.0, 2.889), (1e4, 9.99995)])
def test_the_response_to_a_jump(jump, expected):
    v = torch.full((4, 4), B2 + (1 - B2) * jump**2)
    assert update_rms(torch.full((4, 4), jump), v, EPS, 5000).item() == pytest.approx(expected, rel=2e-3)


def test_the_rms_does_not_depend_on_the_gradients_size():
    drawn = gradients(2)
    v = drawn[0].square() * 0.3 + 0.1
    small, large = (update_rms(drawn[1] * size, v * size**2, 1e-18, 1, 0.5).item() for size in (2.0**-10, 2.0**10))
    assert small == large > 1


def test_each_tensor_has_a_rate_of_its_own():
    """Vectors are clipped as well, and a spike in one tensor leaves the other alone."""
    drawn = gradients(6)
    spiked, calm = torch.nn.Parameter(drawn[0].clone()), torch.nn.Parameter(drawn[0][0].clone())
    lone, alone = pair(drawn[0][0], weight_decay=0.1, clip_updates=True)
    optimizer = adamw([spiked, calm], lr=1e-2, betas=(B1, B2), eps=EPS, weight_decay=0.1, clip_updates=True)
    for t, gradient in enumerate(drawn):
        spiked.grad, calm.grad = gradient * (1e3 if t == 4 else 1), gradient[1].clone()
        optimizer.step()
        step(lone, alone, gradient[1])
    assert torch.equal(calm, lone)


def test_update_clipping_needs_adamw():
    """A rule that updates all parameters takes no clip_updates; Muon leaves vectors and embeddings to AdamW."""

    @dataclass(frozen=True)
    class Lion(Rule):
        """Updates all parameters."""

        moments: tuple[str, ...] = ("exp_avg",)

    run = composed("model.layers=2", "optim.clip_updates=true", "max_grad_norm=0")
    chosen = build.choices(run, build.layout(run))
    chosen.check_memory(Sizes())
    other = replace(chosen, rule=Lion())
    with pytest.raises(ValueError, match="optim.clip_updates=true is for AdamW's updates, and .*Lion.* updates all"):
        other.check_memory(Sizes())
    muon = composed("model.layers=2", "optim=muon", "optim.clip_updates=true", "max_grad_norm=0")
    build.choices(muon, build.layout(muon)).check_memory(Sizes())
