"""States in host memory: the bits of states on the device, also after a checkpoint; what is refused."""

import pytest
import torch

from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train import build
from lowprec_train.train.checkpoint import Checkpointer, ModelState, OptimizerState
from tests.optim.cases import SYSTEMS, equal, fill, model, tensors
from tests.optim.cases import build as made
from tests.recipes import composed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def system(name, device="cpu", **options):
    net = model(device=device)
    return net, made(list(net.parameters()), name, **options)


def steps(net, optimizer, first, count):
    """Some steps after the backward pass, some parameter by parameter, in an order that changes at the last one."""
    for step in range(first, first + count):
        optimizer.prefetch()
        fill(net, step)
        if step % 2:
            optimizer.step(grad_scale=torch.tensor(2.0, device=net[2].weight.device))
        else:
            for parameter in list(net.parameters())[:: 1 if step < first + count - 1 else -1]:
                optimizer.step_only([parameter])
    optimizer.synchronize()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SYSTEMS)
def test_states_are_those_of_the_device(name, device):
    (here, on_device), (there, on_host) = (system(name, device, offload=offload) for offload in (False, True))
    steps(here, on_device, 0, 7), steps(there, on_host, 0, 7)
    moved = {key for p in there.parameters() if p.ndim == 2 for key, t in on_host.state[p].items() if t.numel() > 1}
    assert "exp_avg" in moved and all(on_host.state[there[2].weight][key].device.type == "cpu" for key in moved)
    found, wanted = tensors(there, on_host), tensors(here, on_device)
    assert equal({key: value.cpu() for key, value in found.items()}, {key: v.cpu() for key, v in wanted.items()})


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_of_either_continues_as_the_other(device, tmp_path):
    """Saved where states are on the host, read where they are not, and the other way round."""
    whole, optimizer = system("adamw_coat", device)
    steps(whole, optimizer, 0, 6)
    for first, second in ((True, False), (False, True)):
        net, before = system("adamw_coat", device, offload=first)
        steps(net, before, 0, 3)
        saving = Checkpointer(tmp_path / str(first), interval=1, keep=1, asynchronous=False)
        saving.save({"model": ModelState(net), "optimizer": OptimizerState(net, before)}, 3, wait=True)
        other, after = system("adamw_coat", device, offload=second)
        steps(other, after, 10, 2)
        after.prefetch()  # what was fetched ahead of a load is not used after it
        assert saving.load({"model": ModelState(other), "optimizer": OptimizerState(other, after)}) == 3
        steps(other, after, 3, 3)
        wanted, found = tensors(whole, optimizer), tensors(other, after)
        assert equal({k: v.cpu() for k, v in found.items()}, {k: v.cpu() for k, v in wanted.items()})


def test_slots_are_a_few_states_and_not_all():
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 32) for _ in range(12)))
    optimizer = made(list(net.parameters()), "adamw", offload=True)
    assert sum(slot._buffer.numel() for slot in optimizer._host._slots) == 3 * 2 * 4 * 64 * 32


def test_vectors_alone_are_refused():
    with pytest.raises(ValueError, match="no parameter has a state that could be in host memory"):
        made([torch.nn.Parameter(torch.ones(8))], "adamw", offload=True)


@pytest.mark.parametrize(
    ("overrides", "sizes", "said"),
    [
        (("telemetry_interval=5",), Sizes(), "telemetry_interval=5 reads them"),
        (("log_update_rms=true",), Sizes(), "log_update_rms=true reads them"),
        ((), Sizes(dp_shard=4), "supports one GPU, and this run has 4"),
    ],
)
def test_what_states_on_the_host_exclude_is_refused(overrides, sizes, said):
    run = composed("model.layers=2", "optim.offload=true", *overrides)
    with pytest.raises(ValueError, match=f"optim.offload=true .*{said}"):
        build.choices(run, build.layout(run)).check_memory(sizes, on_gpu=True)
