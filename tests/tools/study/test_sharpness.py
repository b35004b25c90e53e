"""Sharpness against what an optimiser finds in the box, against all of its corners, and through a model."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lowprec_train.data.loader import Batch
from lowprec_train.recipes import bf16
from lowprec_train.tools.study.sharpness import losses, sharpness
from tests.recipes import build


def cross_entropy(y, target):
    return float(np.logaddexp.reduce(y) - y[target])


@pytest.mark.parametrize("epsilon", [1e-3, 0.1])
def test_the_corner_is_the_maximum(epsilon):
    """Of all 2^9 corners, and what L-BFGS-B climbs to from inside, as published."""
    generator = np.random.default_rng(5)
    for target in range(3):
        y = 3 * generator.standard_normal(9)
        reach = epsilon * (np.abs(y) + 1)
        plain, worst = losses(torch.from_numpy(y)[None], torch.tensor([target]), epsilon)
        assert plain.item() == pytest.approx(cross_entropy(y, target))
        corners = (y + reach * np.array(signs) for signs in itertools.product((-1, 1), repeat=9))
        assert worst.item() == pytest.approx(max(cross_entropy(corner, target) for corner in corners), rel=1e-12)
        climbed = minimize(lambda z, t=target: -cross_entropy(z, t), y, bounds=[*zip(y - reach, y + reach)])
        assert -climbed.fun == pytest.approx(worst.item(), rel=1e-6)


def test_through_a_model():
    """The last token's logits alone count, and two batches are one set of sequences."""
    model, _ = build(bf16.recipe())
    tokens = torch.randint(0, 64, (6, 32), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    batches = [Batch(tokens=tokens[part], targets=targets[part], documents=None) for part in (slice(0, 4), slice(4, 6))]
    with torch.inference_mode():
        y = model.logits(tokens)[:, -1].double().numpy()
    plain, worst = [], []
    for row, target in zip(y, targets[:, -1].tolist(), strict=True):
        away = 1e-3 * (np.abs(row) + 1)
        away[target] *= -1
        plain.append(cross_entropy(row, target))
        worst.append(cross_entropy(row + away, target))
    want = 100 * (np.mean(worst) - np.mean(plain)) / (1 + np.mean(plain))
    assert sharpness(model, batches, torch.device("cpu")) == pytest.approx(want, rel=1e-3)
    assert want > 0.01
