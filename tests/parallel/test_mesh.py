"""The grid of processes: what its axes must multiply to, and what is said when they do not."""

import pytest

from lowprec_train.parallel.mesh import Sizes, sizes


def test_a_shard_axis_takes_what_is_left():
    assert sizes(8, dp_replicate=1, dp_shard=-1, tp=2) == Sizes(dp_shard=4, tp=2)
    assert sizes(8, dp_replicate=2, dp_shard=-1, tp=1) == Sizes(dp_replicate=2, dp_shard=4)
    assert sizes(1, dp_replicate=1, dp_shard=-1, tp=1) == Sizes()
    assert Sizes(dp_replicate=2, dp_shard=4, tp=2).dp == 8


@pytest.mark.parametrize(
    ("processes", "axes", "message"),
    [
        (8, (1, 2, 2), "parallel.dp_replicate=1, parallel.dp_shard=2, parallel.tp=2 need 4 processes, and 8"),
        (6, (2, -1, 2), r"2 \* 2 does not divide 6 processes"),
        (2, (0, -1, 1), "each must be at least 1"),
        (2, (1, 0, 1), "each must be at least 1"),
        (2, (1, -2, 1), "each must be at least 1"),
        (2, (1, -1, -1), "each must be at least 1"),
    ],
)
def test_what_does_not_multiply(processes, axes, message):
    replicate, shard, tp = axes
    with pytest.raises(ValueError, match=message):
        sizes(processes, dp_replicate=replicate, dp_shard=shard, tp=tp)
