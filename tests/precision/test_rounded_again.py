"""X that the op before saves for its own backward pass is saved as it is, and rounded again by the op that makes X^T:
the bits of saved codes, and a byte an element less.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowprec_train.model.attention import Attention
from lowprec_train.model.joint_graph import partitioned
from lowprec_train.model.transformer import compile_method
from lowprec_train.ops import library
from lowprec_train.precision.policy import attach_draws
from tests.precision.test_plan import plan
from tests.recipes import RECIPES, system

FOLDED, TRANSPOSED = ("fp8_eden4",), ("fp8", "w4a8")


@pytest.mark.parametrize("name", RECIPES)
def test_only_codes_of_e4m3_under_a_power_of_two_are_rounded_again(name):
    found = plan(RECIPES[name])
    again = found.rounding_x_again()
    assert (again != found) == (name in FOLDED + TRANSPOSED)
    if again != found:
        gemms = again.describe()
        assert gemms["fprop"]["X"] == "fresh, quantize; saved: as the op before saves it, rounded again"
        assert (gemms["wgrad"]["X^T"] == "fresh, quantize_transposed") == (name in TRANSPOSED)
        for other in (plan(RECIPES[name], 1), plan(RECIPES[name], fused=False)):
            assert other.rounding_x_again() == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_with_a_scale_are_those_of_their_codes(dtype):
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    how = (torch.tensor(3), 128, 0.125, (1, 16), "mse", 11, True)
    codes, scale = torch.ops.lowprec.quantize(x, "E4M3", (-1, -1), "POW2", 1.0, 0, "nearest", None, None)
    for transposed in (True, False):
        given = how if transposed else (None, 0, *how[2:])
        for rounds in (torch.ops.lowprec.rotate_fold_ladder, library.EAGER["rotate_fold_ladder"]):
            for got, want in zip(rounds(x, scale, transposed, *given), rounds(codes, scale, transposed, *given)):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    with pytest.raises(RuntimeError, match="under one scale"):
        torch.ops.lowprec.rotate_fold_ladder(x, scale.expand(128, 1).contiguous(), True, *how)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FOLDED + TRANSPOSED)
def test_attention_saves_its_result_once(name, compiled):
    found, kept, sizes = [], [], []
    for saved in (True, False):
        one = system(name, "llama_tiny", "model.recompute=none")
        block = one.model.blocks[0]
        for module in block.modules():
            if isinstance(module, Attention):
                module.out.x_is_saved = saved
        attach_draws(one.model, one.seeds.at(0, 0))
        if compiled:
            torch._dynamo.reset()
            compile_method(block, "forward", fullgraph=True, backend=partitioned)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 64, one.model.dim, generator=generator).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = block(x, one.model.position.angles(64), None)
        sizes.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()))
        kept.clear()
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in block.parameters())])
    less = x.numel()  # bytes of codes
    assert less / 2 < sizes[1] - sizes[0] <= less, sizes
    for again, codes in zip(*found, strict=True):
        assert isinstance(again, Tensor) and torch.equal(again, codes)
