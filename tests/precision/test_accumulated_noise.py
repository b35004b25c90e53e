"""What stochastic rounding and random signs do to W is drawn anew in each micro-batch, so accumulation averages it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import SeedTable
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.recipes import mxfp4, mxfp4_fp8, nvfp4
from tests.precision.noise import IN, OUT, TOKENS, gradients, layer, standard_score, weight_noise

MANY = 48  # micro-batches of a step


@pytest.mark.parametrize("recipe", [mxfp4.recipe(), mxfp4.recipe(rotation=0), mxfp4_fp8.recipe()], ids=str)
def test_the_noise_of_a_weight_is_independent_between_micro_batches(recipe):
    seeds, noises = SeedTable(3, 1), []
    for micro_batch in range(6):
        noises.append(weight_noise(recipe, seeds.at(7, micro_batch * TOKENS).site(0)))
        assert noises[-1].std() > 0.05  # a code of E2M1 is some tenths of a weight
    scores = [standard_score(a, b) for i, a in enumerate(noises) for b in noises[:i]]
    assert max(map(abs, scores)) < 4.5, scores
    assert torch.equal(weight_noise(recipe, seeds.at(7, 0).site(0)), noises[0])


@pytest.mark.parametrize("recipe", [mxfp4.recipe(), mxfp4_fp8.recipe(), nvfp4.recipe()], ids=["mxfp4", "fp8", "nvfp4"])
def test_signs_are_drawn_anew_in_each_micro_batch_and_shared_by_both_operands(recipe):
    """Equal signs, and X^T H and dY^T H agree: else dW would be noise. Over `MANY` micro-batches each sign is + about
    half of the time."""
    seeds, signs = SeedTable(5, 1), []
    g = torch.Generator().manual_seed(2)
    x, dy = torch.randn(TOKENS, IN, generator=g), torch.randn(TOKENS, OUT, generator=g)
    for micro_batch in range(MANY):
        site = seeds.at(7, micro_batch * TOKENS).site(0)
        seed = site.seeds[6]  # wgrad, rotation
        signs.append(torch.ops.lowprec.hadamard(torch.eye(16), seed, 16)[:, 0].sign())
        _, dw = gradients(layer(recipe, site), x, dy)
        exact = dy.double().t() @ x.double()
        assert torch.cosine_similarity(dw.flatten(), exact.flatten(), dim=0) > 0.9
    plus = (torch.stack(signs) > 0).double().mean(0)
    assert (plus - 0.5).abs().max() < 4.5 * 0.5 / MANY**0.5


def averaged(recipe: LinearRecipe, addresses: list[tuple[int, int]]) -> tuple[float, float]:
    """Relative error of dX and dW averaged over micro-batches of the same data at (step, first token)."""
    g = torch.Generator().manual_seed(4)
    x, dy = torch.randn(TOKENS, IN, generator=g), torch.randn(TOKENS, OUT, generator=g)
    seeds, sums = SeedTable(3, 1), [torch.zeros(TOKENS, IN).double(), torch.zeros(OUT, IN).double()]
    made = layer(recipe, seeds.at(0, 0).site(0))
    for address in addresses:
        made.draws = seeds.at(*address).site(0)
        for total, part in zip(sums, gradients(made, x, dy)):
            total += part / len(addresses)
    exact = dy.double() @ made.weight.detach().double(), dy.double().t() @ x.double()
    errors = [float((mean - right).norm() / right.norm()) for mean, right in zip(sums, exact)]
    return errors[0], errors[1]


def test_the_error_of_accumulated_gradients_falls_as_that_of_independent_draws():
    """One error each of 16,384 elements or more: its root mean square is known to a percent or two."""
    recipe = mxfp4.recipe()
    one = averaged(recipe, [(0, 0)])
    within = averaged(recipe, [(0, micro_batch * TOKENS) for micro_batch in range(MANY)])
    independent = averaged(recipe, [(step, 0) for step in range(MANY)])
    for alone, found, expected in zip(one, within, independent):
        assert found == pytest.approx(expected, rel=0.05)
        assert found == pytest.approx(alone / np.sqrt(MANY), rel=0.1)
