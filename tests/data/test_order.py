"""The shuffle is a permutation that depends on its key alone; the blend is the greedy rule at any place."""

from fractions import Fraction

import numpy as np
import pytest

from lowprec_train.data.order import Blend, mix, permute, shuffle_key


def key(seed: int, epoch: int, count: int, stream: int = 0) -> np.ndarray:
    return shuffle_key(seed, stream, np.full(count, epoch))


def order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return permute(np.arange(size), size, key(seed, epoch, size)).tolist()


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000, 1024, 65_537])
def test_every_index_once(size):
    assert sorted(order(size)) == list(range(size))


def test_any_place_costs_the_same():
    """The image of an index does not depend on which others are asked for, and no size is too large."""
    size, epoch = 10**15 + 37, 10**6
    index = np.array([0, 1, size // 2, size - 1])
    together = permute(index, size, key(1, epoch, 4))
    alone = [int(permute(index[i : i + 1], size, key(1, epoch, 1))[0]) for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4 and all(0 <= image < size for image in alone)


def test_order_is_pinned():
    """A run that is resumed by a later version must read the same samples: these numbers never change."""
    assert order(10) == [5, 1, 7, 4, 9, 0, 2, 6, 8, 3]
    assert permute(np.arange(3), 10**9, key(1234, 5, 3)).tolist() == [905895207, 176533354, 207837982]
    # the first three outputs of splitmix64 from state 0, as published with it
    state = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_seed_epoch_and_stream_change_the_order():
    keys = [key(0, 0, 50), key(1, 0, 50), key(0, 1, 50), key(0, 0, 50, stream=1), key(-1, 0, 50), key(2**63, 0, 50)]
    orders = {tuple(permute(np.arange(50), 50, k).tolist()) for k in keys}
    assert len(orders) == len(keys)


@pytest.mark.parametrize("size", [3, 7, 10])
def test_places_are_uniform(size):
    """Over many epochs each index comes to each place equally often: chi-square of every place, 5-sigma bound."""
    epochs = 6000
    count = epochs * size
    epoch, index = np.divmod(np.arange(count), size)
    image = permute(index, size, shuffle_key(3, 0, epoch))
    seen = np.bincount(index * size + image, minlength=size * size)
    expected, freedom = epochs / size, (size - 1) ** 2
    chi = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_are_scattered():
    """Distances of neighbours after the shuffle: a third of the size on average, as for a random permutation."""
    image = np.array(order(100_000))
    assert np.abs(np.diff(image)).mean() == pytest.approx(100_000 / 3, rel=0.02)


def greedy(weights: list[Fraction], places: int) -> list[tuple[int, int]]:
    """The rule as written: the largest weight * (n + 1) - taken, the first of equals."""
    total = sum(weights)
    taken = [0] * len(weights)
    dealt = []
    for n in range(places):
        errors = [weight / total * (n + 1) - count for weight, count in zip(weights, taken, strict=True)]
        chosen = errors.index(max(errors))
        dealt.append((chosen, taken[chosen]))
        taken[chosen] += 1
    return dealt


@pytest.mark.parametrize(
    "weights",
    [["1"], ["0.7", "0.3"], ["0.5", "0.3", "0.2"], ["1", "1", "1"], ["0.1", "0.9"], ["3", "0.25", "7", "1"]],
)
def test_blend_is_the_greedy_rule(weights):
    blend = Blend([float(weight) for weight in weights])
    source, ordinal = blend(np.arange(1000))
    expected = greedy([Fraction(weight) for weight in weights], 1000)
    assert list(zip(source.tolist(), ordinal.tolist(), strict=True)) == expected


def test_blend_far_away_is_quick_and_consistent():
    """At place 10^15 the ordinals go on where the counts of all places before would have left them."""
    blend = Blend([0.1234, 0.5, 0.3766])
    far = 10**15
    source, ordinal = blend(np.arange(far, far + 30_000))
    for number, share in enumerate([0.1234, 0.5, 0.3766]):
        mine = ordinal[source == number]
        assert mine[0] == pytest.approx(share * far, abs=2)
        assert (np.diff(mine) == 1).all()
        assert len(mine) == pytest.approx(share * 30_000, abs=2)


def test_irrational_weights_keep_their_proportions():
    weights = [np.pi, np.e, 0.01, 1.0]
    blend = Blend(weights)
    source, _ = blend(np.arange(200_000))
    counts = np.bincount(source, minlength=4)
    shares = np.array(weights) / sum(weights)
    assert np.abs(counts - shares * 200_000).max() < 200_000 / 65_536 + 2
    assert sum(blend.shares) == pytest.approx(1.0) and blend.shares == pytest.approx(shares, abs=1 / 65_536)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.0], r"blend weight 0\.0: must be a positive number"),
        ([1.0, -2.0], r"blend weight -2\.0"),
        ([1.0, float("nan")], "blend weight nan"),
        ([1.0, 1e-6], r"blend weight 1e-06 is 1e-06 of the blend; the smallest share is 1/65536"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        Blend(weights)
