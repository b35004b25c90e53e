"""What a compiled block keeps that is recomputed as a whole."""

import pytest
import torch

from lowprec_train.model.joint_graph import partitioned
from tests.recipes import system


@pytest.mark.parametrize("recipe", ["bf16", "coat"])
def test_a_block_keeps_its_input_alone(recipe):
    """No codes of weights either, with which torch 2.11 kept 8 GiB more at 7B than was estimated."""
    torch._dynamo.reset()
    one, kept = system(recipe, "llama_tiny", "model.recompute=full", "model.layers=1"), []
    (block,) = one.model.blocks
    one.model.compile_blocks(backend=partitioned, dynamic=False)
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    draws = one.seeds.at(0, 0).part(*one.model.block_sites[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = block(x, one.model.position.angles(64), None, None, None, draws)
    angles = {id(each.untyped_storage()) for each in one.model.buffers()}
    large = [t for t in kept if t.ndim == 3 and t.is_floating_point() and id(t.untyped_storage()) not in angles]
    assert {t.untyped_storage().data_ptr() for t in large} == {x.untyped_storage().data_ptr()}
    assert sum(t.numel() * t.element_size() for t in kept) < 2 * x.numel() * x.element_size()
    y.float().sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in block.parameters())
