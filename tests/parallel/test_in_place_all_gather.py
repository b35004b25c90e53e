"""Units whose weights are gathered in place: two have memory, unless more are gathered at once; and units with other
matrices.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lowprec_train.comm.fsdp import attach, encoded
from lowprec_train.parallel.in_place_all_gather import GatherMemory, UnitAllGather
from lowprec_train.parallel.quantized_all_gather import QuantizedAllGather
from lowprec_train.precision.linear import Linear
from tests.distributed import run_distributed
from tests.parallel.all_gather_runs import whole

CPU = torch.device("cpu")


class Weight:
    """Whether it has memory."""

    def __init__(self):
        self.held = False

    def gather_buffers(self, ranks):
        self.held = True
        return []

    def unpack(self):
        pass

    def free(self):
        self.held = False


class Model:
    """Units of one weight each, and what a forward and a backward pass ask of them."""

    def __init__(self, units, staying=()):
        self.memory, self.weights, self.most = GatherMemory(), [Weight() for _ in range(units)], 0
        self.units = [UnitAllGather([w], self.memory, stays=i in staying) for i, w in enumerate(self.weights)]

    def gather(self, i):
        self.memory.acquire(self.units[i], CPU)
        self.weights[i].gather_buffers(2)
        self.most = max(self.most, self.held)

    def release(self, i):
        self.units[i].release(CPU)

    @property
    def held(self):
        return sum(weight.held for weight in self.weights)


def test_a_forward_pass_has_the_last_unit_and_this_one():
    """The kernels that read a unit may still run when the next one is gathered, so its memory stays for one more."""
    model = Model(5)
    for i in range(5):
        model.gather(i)
        model.release(i)
        assert [weight.held for weight in model.weights] == [j in (i - 1, i) for j in range(5)]


def test_a_backward_pass_has_this_unit_and_the_one_gathered_ahead():
    model = Model(5)
    model.gather(4)
    for i in reversed(range(5)):
        if i:
            model.gather(i - 1)
        assert model.weights[i].held
        model.release(i)
    assert model.most == 2


def test_a_head_that_stays_gathered_takes_no_place_of_a_block():
    """As between the batches of an evaluation."""
    model = Model(5, staying=[4])
    for i in (0, 1, 2, 3, 0, 1, 2, 3):
        if i == 0:
            model.gather(4)
        model.gather(i)
        model.release(i)
        assert model.weights[4].held and model.weights[i].held
        assert i == 0 or model.weights[i - 1].held


def test_units_that_stay_gathered_all_have_memory():
    model = Model(4)
    for i in range(4):
        model.gather(i)
    assert model.held == 4
    for i in range(4):
        model.release(i)
    model.gather(0)
    assert model.weights[0].held and model.held == 2


def test_what_was_read_is_freed_at_the_end_of_a_step():
    model = Model(3)
    for i in range(2):
        model.gather(i)
        model.release(i)
    model.gather(2)
    model.memory.clear()
    assert [weight.held for weight in model.weights] == [False, False, True]
    model.release(0)  # a unit that is not gathered
    model.gather(0)
    assert model.held == 2


class Mixed(nn.Module):
    """A unit of a linear layer and of matrices that FSDP2 gathers itself: small ones, and one without a gradient."""

    def __init__(self, first):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        self.frozen = nn.Parameter(draw(2, 3), requires_grad=False)
        layer = Linear(8, 6, bias=False)
        layer.weight.data.copy_(draw(6, 8))
        names = {"layer": layer, "small": nn.Parameter(draw(2, 1))}
        for name in names if first == "layer" else reversed(names):
            setattr(self, name, names[name])

    def forward(self, x):
        return self.layer(x) * self.small.sum() + self.frozen.sum()


def stepped(model, x):
    y = model(x)
    y.float().sum().backward()
    return {"y": y.detach()} | {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def sharded(rank, first):
    mesh, x = init_device_mesh("cpu", (2,)), torch.arange(16.0).view(2, 8)
    model = fully_shard(Mixed(first), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    attach(model, reduction=encoded(format="FP32"), shard_group=mesh.get_group())
    gather = QuantizedAllGather(model, param_all_gather="bf16", dtype=torch.float32, shards=mesh.get_group())
    made = []
    for _ in range(2):
        gather.prepare()
        made.append(stepped(model, x))
        gather.finish()
        model.zero_grad()
    return made


@pytest.mark.parametrize("first", ["layer", "small"])
def test_a_unit_with_other_matrices(first):
    """The second step gathers into tensors that the first one made."""
    alone = stepped(Mixed(first), torch.arange(16.0).view(2, 8))
    for ranks in run_distributed(sharded, 2, first):
        for made in ranks:
            for name, value in alone.items():
                scale = 1 if name == "y" else 2  # both ranks contribute
                assert torch.allclose(made[name], scale * value, rtol=1e-6), name
