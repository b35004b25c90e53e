"""Sharded parameters are stored in the dtype of their values, BF16 with masters in fewer bits, and freed with their
trainer. Torch's fake process group stands for the other ranks.
"""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.optim.shard import local
from lowprec_train.tools.estimate import memory
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.train import build
from lowprec_train.train.launch import World
from tests.parallel.runs import MICRO, SEQ, SPLIT, TINY, Walks
from tests.recipes import composed
from tests.train.standins import Corpus

RANKS = 2
CPU = torch.device("cpu")


@pytest.fixture
def trainer():
    """`trainer(overrides)` is that of rank 0, and its configuration."""

    def made(*overrides, sizes=SPLIT):
        run = composed("+recipe=fp8", *sizes, *TINY, *overrides)
        laid_out = build.layout(run)
        distribution = build.distribution(run, laid_out, World(0, RANKS, 0), CPU)
        plans = laid_out.plans(CPU, shards=distribution.sizes.dp_shard)
        return run, build.trainer(run, laid_out, plans, Corpus(Walks(), Walks()), distribution, CPU, compiled=False)

    dist.init_process_group("fake", rank=0, world_size=RANKS)
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("master", ["fp32", "bf16", "fp16"])
def test_matrices_of_blocks_and_the_head_are_stored_in_the_dtype_of_their_values(trainer, master):
    run, made = trainer(f"optim/master={master}")
    dtypes = {name: local(p).dtype for name, p in made.model.named_parameters() if isinstance(p, DTensor)}
    values = torch.float32 if master == "fp32" else torch.bfloat16
    assert dtypes.pop("embedding.weight") == torch.float32 and len(dtypes) == 9
    assert set(dtypes.values()) == {values}
    assert all(p.grad_dtype == torch.float32 for p in made.model.parameters())
    stored = sum(local(p).nbytes for p in made.model.parameters())
    assert memory.parameters(Subject(run=run, gpus=RANKS)) == stored


def test_gradients_of_bf16_shards_are_fp32_and_a_step_changes_the_shards(trainer):
    _, made = trainer("optim/master=bf16", "comm=fp32")
    before = {name: local(p).clone() for name, p in made.model.named_parameters()}
    seen = {}
    update = made.optimizer.step

    def step(**arguments):
        seen.update({name: (p.grad.dtype, local(p.grad).dtype) for name, p in made.model.named_parameters()})
        update(**arguments)

    made.optimizer.step = step
    made.step()
    assert seen and set(seen.values()) == {(torch.float32, torch.float32)}
    assert all(not torch.equal(local(p), before[name]) for name, p in made.model.named_parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.param_all_gather=bf16",),
        ("optim.in_backward=true", "max_grad_norm=0"),
        ("+optim/moment@optim.grad_accumulation=fp16",),
    ],
    ids=" ".join,
)
def test_a_trainer_that_is_dropped_frees_its_model(trainer, overrides):
    _, made = trainer(*overrides)
    made.step()
    model = weakref.ref(made.model)
    del made
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_an_embedding_is_gathered_for_the_forward_pass_alone(trainer, reshard):
    """Its backward pass needs no weight, and a gathered embedding of 7B in FP32 has half a GiB."""
    _, made = trainer(
        "comm=fp32", f"parallel.reshard_after_forward={reshard}", f"tokens_per_step={RANKS * MICRO * SEQ}"
    )
    group, seen = made.model.embedding._get_fsdp_state()._fsdp_param_group, []
    gather = group._all_gather_comm

    class Seen:
        allocate = gather.allocate

        def __call__(self, *arguments, **options):
            seen.append("gathered")
            return gather(*arguments, **options)

    made.model.embedding.set_custom_all_gather(Seen())
    made.model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(f"sharded {group.is_sharded}"))
    made.model.blocks[0].register_full_backward_hook(lambda *_: seen.append(f"backward, sharded {group.is_sharded}"))
    before = local(made.model.embedding.weight).clone()
    made.step()
    assert seen == ["gathered", "sharded True", "backward, sharded True"]
    assert not torch.equal(before, local(made.model.embedding.weight))


def test_a_tied_embedding_stays_for_the_head(trainer):
    _, made = trainer("model=gpt_tiny", "comm=fp32", sizes=())
    assert not isinstance(made.model.embedding, FSDPModule) and isinstance(made.model, FSDPModule)
