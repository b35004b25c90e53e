"""How processes meet: a store that outlives restarts, and what one process decides for all."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lowprec_train.train import launch
from tests.distributed import run_distributed


def meet(store, processes):
    """The names that the processes of one attempt agree on."""
    with ThreadPoolExecutor(processes) as threads:
        worlds = [launch.World(rank, processes) for rank in range(processes)]
        names = [threads.submit(launch.attempt, store, world, timedelta(minutes=10)) for world in worlds]
        return {each.result(timeout=60) for each in names}


def test_each_attempt_has_a_name_of_its_own():
    """Keys of earlier attempts, and tokens of processes that died before they were answered, change nothing."""
    store = dist.HashStore()
    store.set("token/1", "of a dead process")
    names = [meet(store, 3) for _ in range(4)]
    assert all(len(each) == 1 for each in names), "all processes of an attempt have one name"
    assert len(set.union(*names)) == 4, "no name is used twice"


def test_one_process_decides_for_itself():
    assert launch.first(lambda: 3) == launch.after_first(lambda: 3) == 3
    with pytest.raises(ValueError, match="mine"):
        launch.first(lambda: (_ for _ in ()).throw(ValueError("mine")))
    assert launch.host_group(1.0) is None


class OfACompiler(Exception):
    """One that holds a module, as errors of torch.compile do."""

    def __init__(self, text):
        super().__init__(text)
        self.module = torch


def fails(rank):
    """What each rank meets, when the second one fails so that its error cannot be sent."""

    def make():
        if rank:
            raise OfACompiler("no such kernel")

    with pytest.raises(RuntimeError) as met:
        launch.every(make)
    return str(met.value)


def test_an_error_that_cannot_be_sent_is_reported_on_every_rank():
    assert run_distributed(fails, 2) == ["OfACompiler: no such kernel"] * 2


def test_a_gpu_is_the_current_device_before_anything_is_cut(monkeypatch):
    """FSDP2 takes the current device for that of its units: without this, every rank's would be the first GPU."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = torch.device("cuda", 3)
    with launch.joined(launch.World(), device, 1.0, dist.HashStore()):
        assert chosen == [device]
    with launch.joined(launch.World(), torch.device("cpu"), 1.0, dist.HashStore()):
        assert chosen == [device]
