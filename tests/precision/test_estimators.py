"""The differentiable estimator against its closed form and its published vector (methods 1.2, T09)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.precision.estimators import DifferentiableEstimator, StraightThrough
from lowprec_train.precision.recipe import override
from lowprec_train.recipes import bf16, fp4
from lowprec_train.tools.study import definition
from tests import oracle
from tests.numerics.data import heavy, normal
from tests.precision import layers

CENTRES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def slope(x: np.ndarray, k: float = 5.0, cap: float = 3.0, scale: float = 1.0) -> np.ndarray:
    """f' of the scaled weights x: what a gradient of ones becomes."""
    w = torch.from_numpy(np.asarray(x, np.float32)).reshape(1, -1) * scale
    got = DifferentiableEstimator(k, cap)(torch.ones_like(w), w, torch.full((1, 1), scale))
    assert got.dtype == torch.float32
    return got[0].double().numpy()


def tolerance(x: np.ndarray, k: float) -> np.ndarray:
    """What four FP32 roundings of x, relative to its distance from the singularity, do to f'."""
    table = oracle.TABLES["E2M1"]
    index = np.clip(np.searchsorted(table, np.abs(x), side="right") - 1, 0, 6)
    width = table[index + 1] - table[index]
    u = np.maximum(np.abs(2 * (np.abs(x) - table[index]) / width - 1), 1e-30)
    return oracle.slope(x, k) * (2.0**-22 + 4 * 2.0**-24 * 2 * np.abs(x) / width / u)


def test_published_vector():
    """MS-AMP's test vector, x = linspace(-6, 6, 20) and k = 5, in exact arithmetic."""
    half = [0.2000, 0.4446, 0.5819, 0.2186, 2.1088, 0.2709, 0.3097, 0.2709, 0.2416, 0.5819]
    x = np.linspace(-6, 6, 20)
    assert np.abs(slope(x) - np.array(half + half[::-1])).max() < 1e-4
    assert np.abs(oracle.slope(x) - np.array(half + half[::-1])).max() < 1e-4


@pytest.mark.parametrize("k", [1.0, 2.0, 3.0, 5.0, 10.0])
def test_closed_form(k):
    x = np.random.default_rng(0).uniform(-6, 6, 20_000).astype(np.float32).astype(np.float64)
    assert (np.abs(slope(x, k) - oracle.slope(x, k)) <= tolerance(x, k)).all()


@pytest.mark.parametrize("k, mean, width", [(5.0, 0.5935, 0.03388), (3.0, 0.7778, 0.03704), (10.0, 0.3832, 0.02284)])
def test_bounds_mean_and_width_of_the_cap(k, mean, width):
    places = (np.arange(8192) + 0.5) / 8192
    for low, high in zip(oracle.TABLES["E2M1"], oracle.TABLES["E2M1"][1:]):
        got = slope(low + places * (high - low), k)
        assert got.min() >= 1 / k * (1 - 1e-6) and got.max() == 3
        assert abs(got.mean() - mean) < 1e-3
        assert abs((got == 3).mean() - width) < 5e-4


@pytest.mark.parametrize("k", [2.0, 5.0])
def test_finite_at_centres_and_lowest_on_the_grid(k):
    assert np.array_equal(slope(np.array(CENTRES), k), np.full(7, 3.0))
    grid = slope(oracle.TABLES["E2M1"], k)
    assert np.allclose(grid, 1 / k, rtol=1e-6)
    assert np.allclose(slope(np.array([6 * (1 + 2.0**-22), -6 * (1 + 2.0**-22)]), k), 1 / k, rtol=1e-4)


def test_symmetric_in_sign():
    x = np.random.default_rng(1).uniform(0, 6, 5000)
    assert np.array_equal(slope(x), slope(-x))


def test_k_of_one_is_straight_through():
    x = np.random.default_rng(2).uniform(-6, 6, 4096)
    assert np.array_equal(slope(x, k=1.0), np.ones(4096))
    grad, w = torch.from_numpy(normal(4, 32)), torch.from_numpy(heavy(4, 32))
    assert torch.equal(DifferentiableEstimator(1.0)(grad, w, torch.ones(4, 1)), grad)
    assert torch.equal(StraightThrough()(grad, w, torch.ones(4, 1)), grad)


def test_finite_differences_of_the_surrogate():
    """f climbs by the integral of f' : away from the capped centres, its central difference."""
    x = np.random.default_rng(3).uniform(-6, 6, 4000)
    h = 1e-6
    table = oracle.TABLES["E2M1"]
    index = np.clip(np.searchsorted(table, np.abs(x), side="right") - 1, 0, 6)
    u = np.abs(2 * (np.abs(x) - table[index]) / (table[index + 1] - table[index]) - 1)
    x = x[(u > 0.05) & (u < 0.999)]
    difference = (oracle.surrogate(x + h, 5) - oracle.surrogate(x - h, 5)) / (2 * h)
    assert np.allclose(slope(x, cap=1e9), difference, rtol=2e-4)
    grid = np.concatenate([-table[::-1], table])
    assert np.allclose(oracle.surrogate(grid, 5), grid)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0, 2.0**30])
def test_the_scale_cancels(factor):
    """(W, s) and (cW, cs) have the same slopes: exactly for a power of two, to rounding for any c."""
    w, grad = torch.from_numpy(normal(8, 64)), torch.from_numpy(heavy(8, 64))
    q = Quantizer(E2M1, (1, -1))
    estimator = DifferentiableEstimator()
    first = estimator(grad, w, q(w).scale)
    assert torch.equal(estimator(grad, w * factor, q(w * factor).scale), first)


def test_the_scale_cancels_for_any_factor():
    w, grad = torch.from_numpy(normal(8, 64)), torch.ones(8, 64)
    q = Quantizer(E2M1, (1, -1))
    first = DifferentiableEstimator()(grad, w, q(w).scale)
    second = DifferentiableEstimator()(grad, w * 0.3, q(w * 0.3).scale)
    assert (first - second).abs().median() < 1e-6
    assert ((first - second).abs() < 1e-2 * first).all()


def test_slopes_of_a_normal_matrix():
    w = torch.from_numpy(np.random.default_rng(4).standard_normal((64, 1000)).astype(np.float32))
    q = Quantizer(E2M1, (1, -1))(w)
    got = DifferentiableEstimator()(torch.ones_like(w), w, q.scale).double()
    assert abs(got.mean() - 0.59) < 0.02
    assert abs((got == 3).double().mean() - 0.034) < 0.004


def test_permuted_slopes_are_those_of_the_weight_before_in_the_row():
    w, grad = torch.from_numpy(normal(8, 64)), torch.from_numpy(heavy(8, 64))
    scale = Quantizer(E2M1, (1, -1))(w).scale
    plain = DifferentiableEstimator()(torch.ones_like(w), w, scale)
    got = DifferentiableEstimator(permuted=True)(torch.ones_like(w), w, scale)
    assert torch.equal(got[:, 1:], plain[:, :-1]) and torch.equal(got[:, 0], plain[:, -1])
    assert torch.allclose(DifferentiableEstimator(permuted=True)(grad, w, scale), grad * got, rtol=1e-6)


@pytest.mark.parametrize("permuted", [False, True])
def test_slopes_alone(permuted):
    """Arms of the study fp4_step_size: Y and dX of a BF16 layer, and its dW times the slopes."""
    study = definition.load(definition.find(Path("fp4_step_size")))
    arm = study.arms["slopes_permuted" if permuted else "slopes"]
    changes = OmegaConf.to_container(OmegaConf.from_dotlist(list(arm.overrides)))["precision"]["override"]
    x, w, dy = layers.make(layers.heavy_tails, "BF16")
    plain = layers.run(layers.linear(bf16.recipe(), w), x, dy, "BF16")
    got = layers.run(layers.linear(override(fp4.recipe(), changes), w), x, dy, "BF16")
    assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1])
    weight = torch.from_numpy(w).bfloat16().float()
    scale = Quantizer(E2M1, (1, -1))(weight).scale
    want = DifferentiableEstimator(permuted=permuted)(
        torch.from_numpy(np.ascontiguousarray(dy.T @ x)).float(), weight, scale
    )
    assert torch.allclose(got[2], want, rtol=2**-8, atol=1e-4)  # dW is made in BF16


def test_a_row_of_zeros_is_finite():
    w = torch.zeros(2, 32)
    got = DifferentiableEstimator()(torch.ones(2, 32), w, Quantizer(E2M1, (1, -1))(w).scale)
    assert torch.allclose(got, torch.full((2, 32), 0.2))


def test_non_finite_gradients_stay_visible():
    grad = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]])
    w = torch.tensor([[1.1, 2.1, 0.3, 6.0]])
    got = DifferentiableEstimator()(grad, w, torch.ones(1, 1))
    assert not torch.isfinite(got[0, :3]).any() and torch.isfinite(got[0, 3])


@pytest.mark.parametrize("k, cap", [(0.5, 3.0), (0.0, 3.0), (5.0, 0.0), (5.0, -1.0)])
def test_refusals(k, cap):
    with pytest.raises(ValueError):
        DifferentiableEstimator(k, cap)


@pytest.mark.parametrize("permuted", [False, True])
def test_many_gradients_are_corrected_in_place(permuted):
    """By the slopes at weights in BF16, of which FP32 masters are given."""
    estimator, shapes = DifferentiableEstimator(permuted=permuted), ((6, 32), (0, 32), (3, 40))
    weights = [torch.from_numpy(normal(n + 1, k)).float()[:n] for n, k in shapes]
    grads, scales = [torch.ones_like(w) * 0.3 for w in weights], [torch.full((1, 1), 0.7) for _ in weights]
    wanted = [estimator(g, w.bfloat16(), s, g.dtype) for g, w, s in zip(grads, weights, scales)]
    estimator.correct_all(grads, weights, scales, torch.bfloat16)
    assert all(map(torch.equal, grads, wanted)) and not torch.equal(grads[0], torch.full((6, 32), 0.3))
    kept = grads[0].clone()
    StraightThrough().correct_all(grads, weights, scales, torch.bfloat16)
    assert torch.equal(grads[0], kept)
