"""Every process group of a run waits as long as `parallel.timeout_minutes` says, and none is made without need."""

import pytest

from tests.distributed import free_port, run_distributed
from tests.parallel.grouped import LAYOUTS, MINUTES, RANKS, on_gpus, work


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(work, RANKS, free_port(), backend=None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_takes_the_timeout(ranks, layout):
    for each in ranks:
        minutes = {name: found for name, (_, found) in each[layout]["groups"].items()}
        assert minutes == {name: dict.fromkeys(found, pytest.approx(MINUTES)) for name, found in minutes.items()}
        assert all(minutes.values()) and len(minutes) >= 5, "default, three axes, the checkpoint's"


def test_the_groups_have_their_ranks(ranks):
    for rank, each in enumerate(ranks):
        assert each["sharded"]["axes"] == {"dp_replicate": [rank], "tp": [rank], "dp_shard": [0, 1, 2, 3]}
        low = rank // 2 * 2
        hybrid = {"dp_replicate": [rank % 2, rank % 2 + 2], "tp": [rank], "dp_shard": [low, low + 1]}
        assert each["hybrid"]["axes"] == hybrid and each["hybrid"]["dp"] == [0, 1, 2, 3]
        tensor = {"dp_replicate": [rank], "tp": [low, low + 1], "dp_shard": [rank % 2, rank % 2 + 2]}
        assert each["tensor"]["axes"] == tensor and each["tensor"]["dp"] == tensor["dp_shard"]


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_groups_of_all_ranks(ranks, layout):
    """The default one, the axis along which there is data, and that of the checkpoint's thread: before there were five,
    each with a socket to every other rank."""
    for each in ranks:
        found = each[layout]
        assert found["dp"] == [0, 1, 2, 3]
        assert sum(len(members) == RANKS for members, _ in found["groups"].values()) == 3
        assert 2 * (RANKS - 1) <= found["sockets"] < 4 * (RANKS - 1), "of two groups, and what listens"


@pytest.mark.gpu
def test_groups_on_gpus():
    """NCCL takes the timeout too; axes have no gloo: that is the default group's and the checkpoint's."""
    for each in run_distributed(on_gpus, 2, free_port(), backend=None, on_gpu=True):
        kinds = {name: set(found) for name, (_, found) in each["groups"].items()}
        assert all(kinds[name] == {"cuda"} for name in each["names"].values())
        assert sum("cpu" in found for found in kinds.values()) == 2 and each["sum"].tolist() == [2.0] * 3
        for _, found in each["groups"].values():
            assert found == dict.fromkeys(found, pytest.approx(MINUTES))
