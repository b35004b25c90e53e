"""A run of 1,024 processes is laid out without them: torch's fake process group answers every collective at once.

The model is cut as a run cuts it, on the meta device, so what 1,024 GPUs could not be given is found on a laptop.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train import build
from lowprec_train.train.launch import World
from tests.recipes import composed

PROCESSES = 1024
LAYOUTS = {
    "sharded": ("parallel.dp_shard=-1",),
    "hybrid": ("parallel.dp_replicate=16", "parallel.dp_shard=64"),
    "tensor": ("parallel.dp_replicate=16", "parallel.dp_shard=8", "parallel.tp=8"),
}
RUN = ("+recipe=fp4", "model=llama_7b", "micro_batch=1", "data.seq_len=2048", "tokens_per_step=4194304")


@pytest.fixture
def joined():
    """`joined(rank)` makes this process one of 1,024."""

    def join(rank):
        dist.init_process_group("fake", rank=rank, world_size=PROCESSES)

    yield join
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 517])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_configuration_of_1024_gpus_builds(joined, layout, rank):
    run = composed(*RUN, *LAYOUTS[layout])
    joined(rank)
    laid_out = build.layout(run)
    cut = build.distribution(run, laid_out, World(rank, PROCESSES, rank % 8), torch.device("cpu"))
    model = laid_out.model
    assert cut.sizes.processes == PROCESSES and all(parameter.is_meta for parameter in model.parameters())
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == run.model.layers + 3
    context = cut.data_parallel(model, run.parallel, reduction=build.construct(run.comm), micro_batches=2)
    assert (context.count, context.index) == (cut.sizes.dp, rank // cut.sizes.tp)
    shards, subject = cut.shards(model), Subject(run=run, gpus=PROCESSES)
    parts = {weight.name: weight.mine(subject.sizes) for weight in subject.weights}
    assert len(parts) == len(shards)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert tuple(local.shape) == shards[parameter].local
        assert all(size <= most for size, most in zip(local.shape, parts[name], strict=True)), name
        assert rank or tuple(local.shape) == parts[name]
