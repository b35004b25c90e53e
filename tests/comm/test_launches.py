"""How much a unit's reduction launches: an encode, one collective and a decode, whatever the parameters and the ranks;
under a scale of all ranks one pass for the maxima and one small collective before them.

Torch's fake process group stands for the other ranks: it answers every collective at once.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_train.comm.axis import Axis
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.fsdp import UnitSum
from lowprec_train.comm.layout import sharded_layout
from lowprec_train.comm.shared_scale import SharedScaleCodec
from lowprec_train.numerics.formats import BF16, E4M3, E5M2, FP32

NO_LAUNCH = {"empty", "empty_like", "new_empty", "view", "_unsafe_view", "split", "split_with_sizes", "select", "slice"}
NO_LAUNCH |= {"detach", "alias", "as_strided", "view_as", "unsqueeze"}


class Launches(TorchDispatchMode):
    """Names of the operations that a device would run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name not in NO_LAUNCH:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=[4, 64])
def ranks(request):
    dist.init_process_group("fake", rank=1, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def launched(reduce):
    with Launches() as launches, torch.no_grad():
        reduce()
    return launches.names


def unit(parameters):
    return {f"weights.{i}": (256, 64 + 8 * (i % 3)) for i in range(parameters)}


def gradients(layout, ranks, dtype=torch.float32):
    return [torch.randn(ranks * each.size, dtype=dtype) for each in layout.ranges]


def alone(codec):
    return Axis(None, codec, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", [1, 9, 100])
@pytest.mark.parametrize("format", [E4M3, E5M2, BF16, FP32])
def test_a_reduce_scatter_is_three_launches(ranks, parameters, format, dtype):
    """The encode reads the gradients; those in the dtype of the wire are sent as they lie, by NCCL at once."""
    layout, codec = sharded_layout(unit(parameters), ranks, exclude=["weights.3*"]), BlockScaledCodec(format)
    of_unit, given = (
        UnitSum(Axis(dist.group.WORLD, codec, "cpu"), alone(codec), layout),
        gradients(layout, ranks, dtype),
    )
    names = launched(lambda: of_unit.reduce_scatter(given))
    unchanged = format in (BF16, FP32) and format.carrier == dtype
    sent = ["alltoall_base_"] * parameters if unchanged else ["encode_gradients", "alltoall_base_"]
    assert names == [*sent, "decode_gradients"]


@pytest.mark.parametrize("parameters", [1, 9, 100])
@pytest.mark.parametrize("format", [E4M3, BF16])
def test_an_all_reduce_is_six(ranks, parameters, format):
    layout, codec = sharded_layout(unit(parameters)), BlockScaledCodec(format)
    of_unit, flat = UnitSum(alone(codec), Axis(dist.group.WORLD, codec, "cpu"), layout), torch.randn(layout.size)
    names = launched(lambda: of_unit.all_reduce(flat))
    ours = ["encode_gradients", "decode_gradients"]
    assert [name for name in names if name in ours] == ours * 2 and len(names) == 6


SHARED = ["linalg_vector_norm", "all_reduce", "encode_gradients_by", "alltoall_base_", "decode_gradients_by"]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_a_shared_scale_takes_as_many_whatever_the_parameters(ranks, kind):
    """One pass for the maxima of all parameters, one collective of them, encode, one exchange, decode; the rest works
    on a number a parameter or on mu. Codes at the maximum are added up once a step, not once a unit. A reduce-scatter
    first copies the gradients to one buffer.
    """
    gathered = ["encode_gradients_by", "_allgather_base_", "decode_gradients_by"] if kind == "all_reduce" else ["cat"]
    counts, codec = set(), SharedScaleCodec()
    for parameters in (3, 30):
        layout = sharded_layout(unit(parameters), ranks if kind == "reduce_scatter" else 1, exclude=["weights.1*"])
        axis, given = Axis(dist.group.WORLD, codec, "cpu"), gradients(layout, ranks)
        reduce = partial(UnitSum(axis, alone(codec), layout).reduce_scatter, given)
        if kind == "all_reduce":
            reduce = partial(UnitSum(alone(codec), axis, layout).all_reduce, torch.randn(layout.size))
        reduce()  # the first makes a table of the parameters' lines
        names = launched(reduce)
        expected = SHARED + gathered if kind == "all_reduce" else gathered + SHARED
        assert [name for name in names if name in (*SHARED, *gathered)] == expected
        counts.add(len(names))
    assert counts == {13 + len(gathered)}


def test_codes_at_the_maximum_are_added_up_once_a_step(ranks):
    layout, codec = sharded_layout(unit(3), ranks), SharedScaleCodec()
    axis = Axis(dist.group.WORLD, codec, "cpu")
    for _ in range(5):
        UnitSum(axis, alone(codec), layout).reduce_scatter(gradients(layout, ranks))
    names = launched(axis.at_maximum)
    assert [name for name in names if "gather" in name or "reduce" in name] == ["all_gather_into_tensor"]
