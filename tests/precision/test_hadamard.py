"""The random Hadamard transform against the explicit matrix (methods T08, section 3.3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import Gemms, SeedTable
from lowprec_train.precision.hadamard import RandomHadamard
from tests import oracle
from tests.numerics.data import heavy, normal

BLOCKS = [2, 4, 8, 16, 32, 64, 128, 256]
U = 2.0**-24


def seed(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("matrix", [normal, heavy], ids=lambda f: f.__name__)
def test_is_the_explicit_matrix(block, matrix):
    """A sum of g signed values in log2 g steps loses at most log2 g + 2 roundings of the sum of magnitudes."""
    x = matrix(6, 512)
    got = RandomHadamard(block)(torch.from_numpy(x), seed(77))
    assert got.dtype == torch.float32
    want = oracle.rotate(x, 77, block)
    magnitude = np.abs(x.astype(np.float64)).reshape(-1, block).sum(1, keepdims=True) / np.sqrt(block)
    bound = (np.log2(block) + 2) * U * magnitude.repeat(block, axis=1).reshape(x.shape)
    assert (np.abs(got.double().numpy() - want) <= bound).all()


@pytest.mark.parametrize("block", [4, 16, 64, 256])
def test_is_the_butterflies_bit_for_bit(block):
    x = heavy(6, 512)
    got = RandomHadamard(block)(torch.from_numpy(x), seed(77)).numpy()
    assert np.array_equal(got, oracle.rotate_float32(x, 77, block))


@pytest.mark.parametrize("block", BLOCKS)
def test_is_orthogonal_and_undone_by_the_same_signs(block):
    matrix = RandomHadamard(block)(torch.eye(block), seed(5)).double()
    assert torch.allclose(matrix @ matrix.t(), torch.eye(block).double(), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, block**-0.5), rtol=1e-6)
    signs = torch.from_numpy(oracle.signs(5, block))
    plain = torch.from_numpy(oracle.hadamard_matrix(block) / np.sqrt(block))
    x = torch.from_numpy(normal(8, block)).double()
    back = (RandomHadamard(block)(x.float(), seed(5)).double() @ plain) * signs
    assert torch.allclose(back, x, atol=1e-5)


@pytest.mark.parametrize("block", [16, 64])
def test_preserves_products_and_only_with_shared_signs(block):
    a, b = torch.from_numpy(normal(12, 256)), torch.from_numpy(heavy(9, 256))
    rotate = RandomHadamard(block)
    want = a.double() @ b.double().t()
    shared = rotate(a, seed(3)).double() @ rotate(b, seed(3)).double().t()
    other = rotate(a, seed(3)).double() @ rotate(b, seed(4)).double().t()
    magnitude = a.double().norm(dim=1, keepdim=True) * b.double().norm(dim=1)
    assert ((shared - want).abs() <= 30 * U * magnitude).all()
    assert ((other - want).norm() / want.norm()).item() > 0.5


def test_spreads_one_outlier_over_its_block_only():
    x = torch.zeros(1, 128)
    x[0, 70] = 8.0
    got = RandomHadamard(64)(x, seed(1))
    assert torch.equal(got[0, 64:].abs(), torch.ones(64)) and not got[0, :64].any()


def test_signs_are_shared_by_blocks_and_balanced_over_seeds():
    first = torch.zeros(1, 128)
    first[0, 3] = first[0, 67] = 1.0
    got = RandomHadamard(64)(first, seed(9))
    assert torch.equal(got[0, :64], got[0, 64:])
    signs = np.stack([oracle.signs(s, 64) for s in range(200)])
    assert len(np.unique(signs, axis=0)) == 200
    assert abs(signs.mean()) < 4.5 / np.sqrt(signs.size)


def test_draws_give_a_gemm_and_a_step_signs_of_their_own():
    seeds = SeedTable(0, 2)
    x = torch.from_numpy(normal(2, 64))
    seen = []
    for step in (0, 1):
        draws = seeds.at(step, 0)
        for site in (0, 1):
            for gemm in (Gemms.DGRAD, Gemms.WGRAD):
                seen.append(RandomHadamard(64)(x, draws.site(site).signs(gemm)))
    assert all(not torch.equal(seen[i], seen[j]) for i in range(len(seen)) for j in range(i))


def test_bfloat16_input_is_read_exactly():
    x = torch.from_numpy(normal(4, 128)).bfloat16()
    assert torch.equal(RandomHadamard(64)(x, seed(2)), RandomHadamard(64)(x.float(), seed(2)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_stays_in_its_block(bad):
    x = torch.from_numpy(normal(2, 128))
    x[0, 5] = bad
    got = RandomHadamard(64)(x, seed(2))
    assert not torch.isfinite(got[0, :64]).any() and torch.isfinite(got[0, 64:]).all() and torch.isfinite(got[1]).all()


@pytest.mark.parametrize("block", [0, 1, 3, 48, 512, -2])
def test_blocks_are_powers_of_two_up_to_256(block):
    with pytest.raises(ValueError, match=str(block)):
        RandomHadamard(block)


def test_a_block_divides_the_reduction():
    RandomHadamard(64).check(128)
    with pytest.raises(ValueError, match=r"64.*96|96.*64"):
        RandomHadamard(64).check(96)
