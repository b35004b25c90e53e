"""The counter generator against its published vectors, and the seed table: every draw has an address."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lowprec_train.numerics.draws import BY_TOKEN, LAST_TOKEN, STREAMS, Gemms, Operand, SeedTable
from lowprec_train.numerics.formats import E2M1, STOCHASTIC
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.ops.philox import philox, random_bits
from tests import oracle

# Random123's kat_vectors for philox4x32-10: counter, key, words
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
BIG = 0x9ABC_DEF0_1234_5678 - 2**64  # a seed with its top bit set


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_published_vectors(counter, key, words):
    assert tuple(int(w) for w in oracle.philox(counter, key)) == words
    seed = key[0] | key[1] << 32
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    got = philox(tuple(torch.tensor(c) for c in counter), signed)
    assert tuple(int(w) for w in got) == words


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 12345, BIG])
@pytest.mark.parametrize("place", [None, (0, 0), (7, 8), (5_000_000_000 % 2**32, 40_000)])
def test_bits_are_the_oracles(seed, place):
    origin = None if place is None else torch.tensor(place)
    got = random_bits(torch.tensor(seed), origin, 5, 29)
    assert got.dtype == torch.int32
    assert np.array_equal(got.numpy(), oracle.random_bits(seed, 5, 29, place or (0, 0)))


def test_bits_are_uniform():
    bits = random_bits(torch.tensor(11), None, 256, 200).double().numpy()
    n = bits.size
    assert bits.min() >= 0 and bits.max() <= 65535
    assert abs(bits.mean() - 32767.5) < 4.5 * 65536 / np.sqrt(12 * n)
    for bit in range(16):
        share = ((bits.astype(int) >> bit) & 1).mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / np.sqrt(n)
    counts = np.bincount(bits.astype(int).ravel() >> 8, minlength=256)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 4.5 * np.sqrt(2 * 255)


def table(run_seed: int, sites: int, step: int, first_token: int = 0) -> np.ndarray:
    draws = SeedTable(run_seed, sites).at(step, first_token)
    return np.stack([draws.site(i).seeds.numpy() for i in range(sites)])


@pytest.mark.parametrize("run_seed", [0, 42, 2**40 + 7])
@pytest.mark.parametrize(("step", "first_token"), [(0, 0), (1, 8), (100_000, 4096), (2**32 + 5, LAST_TOKEN - 8)])
def test_the_table_is_the_oracles(run_seed, step, first_token):
    want = [
        [
            oracle.draw_seed(run_seed, site, gemm, purpose, step, first_token)
            for gemm in range(3)
            for purpose in range(3)
        ]
        for site in range(4)
    ]
    assert np.array_equal(table(run_seed, 4, step, first_token), want)


def test_every_address_has_a_seed_of_its_own():
    tables = [table(run_seed, 5, step) for run_seed, step in itertools.product((0, 1, 2, -1), (0, 1, 2, 1000))]
    seeds = np.stack(tables)
    assert seeds.shape[-1] == STREAMS == 9
    assert len(np.unique(seeds)) == seeds.size
    assert (seeds >= 0).all()


def test_weights_and_signs_have_seeds_of_their_own_in_each_micro_batch_and_tokens_have_not():
    """Over micro-batches of three sizes, all of which one step could have."""
    seeds = np.stack([table(9, 3, 4, first_token) for first_token in (0, 8, 64, 128, 4096, 2**20, LAST_TOKEN - 8)])
    of_tokens = [int(gemm) * 3 + int(purpose) for gemm, purpose in BY_TOKEN]
    others = np.delete(seeds, of_tokens, axis=2)
    assert (seeds[:, :, of_tokens] == seeds[:1, :, of_tokens]).all()
    assert others.shape[-1] == 5 and len(np.unique(others)) == others.size


def test_an_address_replays_and_no_other_one_writes_to_it():
    table = SeedTable(3, 2)
    first = table.at(5, 0)
    before = [each.clone() for each in first]
    others = [table.at(5, 64), table.at(6, 64)]
    assert all(torch.equal(*pair) for pair in zip(first, before, strict=True))
    assert all(not torch.equal(each.site(1).seeds, first.site(1).seeds) for each in others)
    assert others[0].token_rows.tolist() == [64, 0] and others[0].token_columns.tolist() == [0, 64]
    assert all(torch.equal(*pair) for pair in zip(table.at(5, 0), before, strict=True))


def test_a_part_of_the_sites_is_counted_from_its_first():
    draws = SeedTable(3, 5).at(2, 8)
    part = draws.part(2, 3)
    assert part.seeds.shape == (3, STREAMS)
    for index in range(3):
        assert torch.equal(part.site(index).seeds, draws.site(2 + index).seeds)
    assert part.site(0).token_rows is draws.token_rows and part.site(0).token_columns is draws.token_columns


def test_seed_names_a_stream():
    view = SeedTable(3, 2).at(1, 0).site(1)
    for gemm, stream in itertools.product(Gemms, range(3)):
        seed = view.seed(gemm, Operand(stream)) if stream else view.signs(gemm)
        assert seed.shape == () and seed.dtype == torch.int64
        assert seed.item() == oracle.draw_seed(3, 1, int(gemm), stream, 1)


@pytest.mark.parametrize("cut", [8, 32, 64])
def test_a_token_draws_the_same_however_the_batch_is_split(cut):
    """Rows of dY in dgrad, columns of dY^T and X^T in wgrad: tile (1, 8) so that no scale crosses the cut."""
    tokens = torch.randn(96, 16)
    quantizer = Quantizer(E2M1, (1, 8), rounding=STOCHASTIC)
    table = SeedTable(17, 1)

    def rounded(part: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        view = table.at(2, first).site(0)
        rows = quantizer(part, view.seed(Gemms.DGRAD, Operand.A), view.token_rows)
        columns = quantizer(part.t().contiguous(), view.seed(Gemms.WGRAD, Operand.A), view.token_columns)
        return rows.codes.float(), columns.codes.float()

    rows, columns = rounded(tokens, 0)
    parts = [rounded(tokens[:cut], 0), rounded(tokens[cut:], cut)]
    assert torch.equal(torch.cat([p[0] for p in parts]), rows)
    assert torch.equal(torch.cat([p[1] for p in parts], dim=1), columns)
    assert not torch.equal(rounded(tokens[cut:], 0)[0], rows[cut:])


@pytest.mark.parametrize("first_token", [4, 1, 20, -8, LAST_TOKEN])
def test_a_micro_batch_starts_at_a_multiple_of_eight_that_the_counter_holds(first_token):
    with pytest.raises((ValueError, AssertionError), match=str(first_token)):
        SeedTable(0, 1).at(0, first_token)
