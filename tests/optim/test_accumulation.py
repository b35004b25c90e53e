"""Sums of gradients in codes: their bits, their errors over many micro-batches, what a step makes of them."""

import pytest
import torch
from torch import nn

from lowprec_train.ops.codecs import FP32
from lowprec_train.optim.accumulation import GradientSum, GradientSums, check
from lowprec_train.optim.codecs import expanded, plain, scaled
from lowprec_train.optim.norm import norm_and_squares
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build, checks
from tests.recipes import composed
from tests.train.standins import bits, make_trainer, same

# what stores sums -> relative errors of a sum of 4 and of 256 gradients of noise around a mean of a tenth of it
ERRORS = {
    "BF16": (plain("BF16"), 0.0027, 0.0163),
    "BF16 drawn": (plain("BF16", stochastic=True), 0.0037, 0.0242),
    "FP16": (scaled("FP16"), 0.0003, 0.0021),
    "E4M3 drawn": (scaled("E4M3", stochastic=True), 0.0594, 0.3516),
}


def sums(codec, count, *, place=3, spread=1.0, mean=0.1):
    """(a sum in codes, the sum in FP64) of gradients whose elements have sizes of their own."""
    size = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).exp()
    draws, held, exact = torch.Generator().manual_seed(5), GradientSum(codec, seed=1, place=place), 0.0
    for number in range(count):
        gradient = size * (mean + spread * torch.randn(64, 512, generator=draws))
        held.add(gradient, torch.tensor([number]))
        exact = exact + gradient.double()
    return held.value().double(), exact


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_that_the_page_states(name):
    codec, few, many = ERRORS[name]
    for count, stated in ((4, few), (256, many)):
        found, exact = sums(codec, count)
        assert ((found - exact).norm() / exact.norm()).item() == pytest.approx(stated, rel=0.1, abs=1e-4)


def test_rounding_to_nearest_stalls_and_draws_do_not():
    """Gradients of one sign: E4M3 stops growing where one is below half a step, at about 64 of them."""
    for codec, low, high in ((scaled("E4M3"), -0.7, -0.5), (scaled("E4M3", stochastic=True), -0.01, 0.01)):
        found, exact = sums(codec, 64, spread=0.1, mean=1.0)
        assert low < ((found - exact) * exact).sum() / exact.square().sum() < high


def test_draws_follow_from_the_parameter_the_micro_batch_and_the_place_in_the_whole():
    codec, whole = plain("BF16", stochastic=True), torch.randn(16, 64, generator=torch.Generator().manual_seed(2))

    def of(gradient, number=7, place=3, **where):
        held = GradientSum(codec, seed=1, place=place, **where)
        held.add(gradient, torch.tensor([number]))
        return held.value()

    assert torch.equal(of(whole)[4:, 32:], of(whole[4:, 32:], origin=(4, 32)))
    assert not torch.equal(of(whole), of(whole, number=8)) and not torch.equal(of(whole), of(whole, place=4))


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_norm_counts_a_matrix_without_a_gradient_in_the_last_micro_batch(in_backward):
    first, second = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    held = GradientSums([(0, first), (1, second)], scaled("E4M3"), seed=0, in_backward=in_backward)
    for last in (False, True):
        held.begin(None, last=last)
        (first.sum() + (0.0 if last else 4.0 * second.sum())).backward()
    norm, _ = norm_and_squares([first, second], None, held.squares)
    assert norm == pytest.approx(80**0.5) and second.grad is None
    assert [p.grad.norm().item() for p in held.gradients()] == ([8.0] if in_backward else [4.0, 8.0])


def test_taking_a_sum_leaves_nothing():
    held, ones = GradientSum(scaled("FP16"), seed=0, place=0), torch.ones(3, 2, 4)
    held.add(ones, torch.tensor([0]))
    assert torch.equal(held.take(ones), 2 * ones) and held.empty


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_trainer_with_sums_in_fp32_has_the_bits_of_autograds(in_backward):
    """A poisoned step is skipped by both; clipped where updates are made after the backward pass."""
    runs = []
    for codec in (None, FP32):
        how = {"grad_accumulation": codec, "in_backward": in_backward, "max_grad_norm": 0.0 if in_backward else 0.5}
        trainer = make_trainer(steps=6, poison=(2,), micro_batch=2, **how)
        lines = [trainer.step() for _ in range(6)]
        runs.append((repr([(line["train/loss"], line["train/grad_norm"]) for line in lines]), bits(trainer)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("codec", [plain("BF16"), scaled("E4M3", stochastic=True)])
def test_a_trainer_keeps_codes_between_micro_batches(codec):
    """No gradient of a matrix in FP32 outlives a backward pass, and training goes on as with FP32 sums."""
    trainer, exact = (make_trainer(steps=12, micro_batch=2, grad_accumulation=each) for each in (codec, None))
    loss, alive = trainer.loss.of_model, []

    def watched(*arguments):
        alive.extend(p.grad is not None for p in trainer.model.parameters() if p.ndim > 1)
        return loss(*arguments)

    trainer.loss.of_model = watched
    found, wanted = ([float(each.step()["train/loss"]) for _ in range(12)] for each in (trainer, exact))
    assert alive and not any(alive)
    assert found[-1] < found[0] and found == pytest.approx(wanted, rel=0.05) and found != wanted


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("+optim/moment@optim.grad_accumulation=e4m3_expanded",),
            "optim.grad_accumulation=E4M3 expanded in groups of 128",
        ),
        (("+optim/moment@optim.grad_accumulation=bf16", "telemetry_interval=5"), "telemetry_interval=5 reads them"),
        (("+optim.grad_accumulation.format=BF16",), "optim.grad_accumulation"),
    ],
)
def test_what_cannot_store_sums_is_refused(overrides, said):
    run = composed("model.layers=2", *overrides)
    with pytest.raises(ValueError, match=said):
        checks.nodes(run)
        build.choices(run, build.layout(run)).check_memory(Sizes())


def test_groups_cannot_store_sums():
    assert check(plain("BF16")) == plain("BF16")
    with pytest.raises(ValueError, match="sums of gradients are stored as BF16"):
        check(expanded())
