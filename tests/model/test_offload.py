"""Inputs of blocks on the host: the bits of a run that keeps them, and what goes there."""

from contextlib import nullcontext

import pytest
import torch

from lowprec_train.model.architecture import Architecture
from lowprec_train.model.offload import BlockInputs
from lowprec_train.model.transformer import Transformer
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.launch import ALONE
from tests.parallel.runs import built, described

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = {"vocab_size": 64, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 256, "max_seq_len": 64}
KIND = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False}


def passes(device, backend=None, **changes):
    """Losses and gradients of two micro-batches, and the model."""
    torch._dynamo.reset()
    model = Transformer(Architecture(**SHAPE, **KIND, recompute="full", **changes)).to(device)
    model.init_weights(0)
    if backend is not None:
        model.compile_blocks(backend=backend)
    found = []
    for seed in (0, 1):
        tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(seed)).to(device)
        loss = model.loss(tokens, tokens.roll(-1, 1), 128.0)
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters())], model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_offloaded_and_kept_inputs_give_the_same_bits(device, backend):
    kept, _ = passes(device, backend)
    away, model = passes(device, backend, offload=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, away, strict=True))
    assert sorted(model.block_inputs._flight.host) == [0, 1, 2, 3], "every block's input has been sent"
    assert sum(map(len, model.block_inputs._free.values())) == 4, "and its place was used for both micro-batches"


def test_two_micro_batches_in_flight_have_the_bits_of_one_after_the_other():
    """As in a pipeline schedule: both forward passes, then both backward passes."""
    found = []
    for both in (False, True):
        model = Transformer(Architecture(**SHAPE, **KIND, recompute="full", offload=True))
        model.init_weights(0)
        tokens = [torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
        losses = []
        for each in tokens:
            losses.append(model.loss(each, each, 128.0))
            if not both:
                losses[-1].backward()
        for loss in losses if both else ():
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("between", [False, True], ids=["at once", "after another micro-batch"])
def test_a_second_backward_pass_is_refused(device, between):
    """Its inputs are not in the buffers any more."""
    model = Transformer(Architecture(**SHAPE, **KIND, recompute="full", offload=True)).to(device)
    model.init_weights(0)
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    logits = model(tokens).float()
    logits.sum().backward(retain_graph=True)
    if between:
        model.loss(tokens, tokens, 128.0).backward()
    with pytest.raises(RuntimeError, match="needs the input of block 3 a second time.*retain_graph=True"):
        logits.square().sum().backward()


def test_a_second_backward_pass_over_inputs_that_are_there_is_right():
    """Two blocks: theirs are the two buffers."""
    found = []
    for offload in (False, True):
        model = Transformer(Architecture(**SHAPE | {"layers": 2}, **KIND, recompute="full", offload=offload))
        model.init_weights(0)
        logits = model(torch.arange(64)[None]).float()
        logits.sum().backward(retain_graph=True)
        logits.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_of_the_stream_stays_between_the_passes():
    """Of all tensors that autograd holds after a forward pass none is an input of a block."""
    model = Transformer(Architecture(**SHAPE, **KIND, recompute="full", offload=True))
    model.init_weights(0)
    tokens, inputs = torch.zeros(2, 64, dtype=torch.int64), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, given: inputs.append(given[0].untyped_storage()._weak_ref()))
    loss = model.loss(tokens, tokens, 1.0)
    alive = [torch.UntypedStorage._new_with_weak_ptr(each) is not None for each in inputs]
    assert alive == [False] * 4 and loss.requires_grad


def test_what_is_evaluated_is_not_sent():
    inputs = BlockInputs()
    with torch.no_grad():
        assert isinstance(inputs.saved(0, torch.ones(2)), nullcontext)


def test_other_tensors_stay_where_they_are():
    inputs, x, other = BlockInputs(), torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
    with inputs.saved(0, x):
        y = x * 2.0 * other
    y.sum().backward()
    assert torch.equal(x.grad, 2 * other) and not inputs._flight.host


def test_a_block_that_saves_more_is_refused():
    with pytest.raises(ValueError, match="model.offload=true needs model.recompute=full, not none"):
        Architecture(**SHAPE, **KIND, offload=True)


def test_a_run_of_a_recipe_with_draws_has_the_same_bits():
    found = []
    for offload in (False, True):
        job = described("fp4", Sizes())
        job.run.model.recompute, job.run.model.offload, job.run.optim.offload = "full", offload, offload
        trainer = built(job.run, ALONE, torch.bfloat16)
        found.append([float(trainer.step()["train/loss"]) for _ in range(3)])
    assert found[0] == found[1]
