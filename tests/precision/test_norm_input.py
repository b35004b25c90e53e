"""A compiled block saves the input of an RMSNorm and not codes of its result, which wgrad's op makes again: the bits of
saved codes, and a byte an element less.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowprec_train.model.attention import Attention
from lowprec_train.model.joint_graph import partitioned
from lowprec_train.model.transformer import Block, compile_block, compile_method
from lowprec_train.ops import library, reference
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import attach_draws
from tests.precision.test_plan import plan
from tests.recipes import RECIPES, system

SAVES = ("fp8_eden4", "fp8", "w4a8")
COSTLY = ("fp4_fold",)  # only under model.recompute=norms


def block_of(*words: str, tokens: int = 64) -> tuple[Block, Tensor, tuple[Any, Any]]:
    """The first block of a model, its input, and its other arguments."""
    one = system(*words)
    attach_draws(one.model, one.seeds.at(0, 0))
    torch._dynamo.reset()
    x = torch.randn(2, tokens, one.model.dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    angles = one.model.position.angles(tokens) if words[1] == "llama_tiny" else None
    return one.model.blocks[0], x.requires_grad_(), (angles, None)


def results(block: Block, x: Tensor, context: tuple[Any, Any]) -> tuple[list[Tensor], int]:
    """The block's output and gradients, and the bytes that its backward pass needs."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = block(x, *context)
    y.square().sum().backward()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())], sum(storages.values())


def form(linear: Linear) -> str:
    return str(linear.plan(128, torch.bfloat16, torch.device("cpu")).saved_x)


@pytest.mark.parametrize("name", RECIPES)
def test_only_codes_under_one_scale_or_of_fold3_are_made_again(name):
    found = plan(RECIPES[name])
    assert (found.rounding_x_again(from_norm=True) != found) == (name in SAVES)
    again = found.rounding_x_again(from_norm=True, costly=True)
    assert (again != found) == (name in SAVES + COSTLY)
    if again != found:
        text = again.describe()["fprop"]["X"]
        assert text.endswith("saved: as the input of the norm before, normalised and rounded again"), text
        assert again.saved_x.count == (3 if again.saved_x.folded else 4)


@pytest.mark.parametrize("name", ["bf16", "mxfp4_fp8", *SAVES])
def test_the_bits_of_saved_codes_and_a_byte_an_element_less(name):
    block, x, context = block_of(name, "llama_tiny", "model.recompute=none")
    compile_method(block, "forward", fullgraph=True, backend=partitioned)
    want, before = results(block, x, context)
    block, x, context = block_of(name, "llama_tiny", "model.recompute=none")
    compile_block(block, fullgraph=True, backend=partitioned)
    got, after = results(block, x, context)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    few = 16 * x[..., 0].numel()  # rates, row scales
    assert abs(before - after - 2 * x.numel() * (name in SAVES)) < few


@pytest.mark.parametrize(
    "words",
    [
        ("fp8_eden4", "gpt_tiny", "model.recompute=none"),
        ("fp8_eden4", "llama_tiny", "model.recompute=none", "model.norm_placement=post"),
        ("fp4_fold", "llama_tiny", "model.recompute=none"),
        ("fp8_eden4", "llama_tiny", "model.recompute=full"),
    ],
)
def test_other_blocks_save_codes(words):
    """LayerNorm, norms after the branches, codes that take an op more, and blocks that are recomputed as a whole."""
    block, x, context = block_of(*words)
    compile_block(block, fullgraph=True, backend=partitioned)
    block(x, *context).sum().backward()
    assert not any("norm" in form(layer) for layer in block.modules() if isinstance(layer, Linear))


def test_a_norm_that_quantises_its_input_changes_the_plan():
    """As under coat: what the norm returns is then made of codes."""
    block, *_ = block_of("fp8_eden4", "llama_tiny", "model.recompute=none")
    compile_block(block, fullgraph=True, backend=partitioned)
    assert form(block.attention.qkv) == form(block.mlp.gate_up) != form(block.mlp.down) == "codes"
    block.attention_norm.quantizer = object()
    assert form(block.attention.qkv) == "codes" != form(block.mlp.gate_up)


def test_an_observer_sees_codes_and_an_eager_block_saves_them():
    block, x, context = block_of("fp8_eden4", "llama_tiny", "model.recompute=none")
    eager, _ = results(block, x, context)
    assert form(block.attention.qkv) == "codes"
    x.grad = None
    block.zero_grad()
    block.save_norm_inputs()
    seen = []
    with pytest.raises(ValueError, match="takes it as norm_input"):
        block.attention.qkv(x)
    for linear in (block.attention.qkv, block.mlp.gate_up):
        linear.observer = lambda spec, x, codes: seen.append(spec.name)
    observed, _ = results(block, x, context)
    assert seen.count("X") == 2 and all(torch.equal(*pair) for pair in zip(eager, observed, strict=True))


@pytest.mark.parametrize("name", SAVES + COSTLY)
def test_recomputed_norms_are_those_of_the_linears(name, monkeypatch):
    """torch recomputes nothing then: the same bits, and a byte an element less for each of three X."""
    found, sizes = [], []
    for words, own in (("none", True), ("norms", False), ("norms", True)):
        monkeypatch.setattr(Block, "save_norm_inputs", Block.save_norm_inputs if own else lambda block: None)
        block, x, context = block_of(name, "llama_tiny", f"model.recompute={words}")
        compile_block(block, fullgraph=True, backend=partitioned)
        made, size = results(block, x, context)
        found.append(made)
        sizes.append(size)
        monkeypatch.undo()
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))
    less, few = 3 * x.numel() * (name in COSTLY), 32 * x[..., 0].numel()
    assert abs(sizes[0] - sizes[2] - less) < few


class OwnForward(Attention):
    def forward(self, x_BTD: Tensor, *context: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTD, *context)


def test_a_module_of_a_user_that_takes_no_norm_input_is_not_given_one():
    block, x, context = block_of("fp8_eden4", "llama_tiny", "model.recompute=none")
    block.attention.__class__ = OwnForward
    block.mlp = nn.Sequential(block.mlp)
    block.mlp.forward = lambda x, draws: block.mlp[0](x, draws)
    block.save_norm_inputs()
    assert not block.attention.qkv.saves_norm_input and not block.mlp[0].gate_up.saves_norm_input
    results(block, x, context)


class OwnMLP(nn.Module):
    fed_by_norm = "linear"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, draws: Any = None, norm_input: Any = None) -> Tensor:
        return self.linear(x_BTD, draws=draws, norm_input=norm_input)


def test_a_module_of_a_user_that_hands_it_on_saves_it():
    found, forms = [], []
    for method in (partial(compile_method, name="forward"), compile_block):
        block, x, context = block_of("fp8_eden4", "llama_tiny", "model.recompute=none")
        torch.manual_seed(0)
        block.mlp = OwnMLP(x.shape[-1])
        block.mlp.linear.recipe = RECIPES["fp8_eden4"]
        method(block, fullgraph=True, backend=partitioned)
        found.append(results(block, x, context)[0])
        forms.append(form(block.mlp.linear))
    assert forms[0] == "codes" and "norm" in forms[1]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ops_take_the_input_of_a_norm(dtype):
    g = torch.Generator().manual_seed(1)
    x, rate, weight = (
        torch.randn(128, 64, generator=g).to(dtype),
        torch.rand(128, generator=g),
        torch.randn(64, generator=g),
    )
    y = (x.float() * rate[:, None] * weight).to(dtype)
    assert torch.equal(reference.normalized(x, rate, weight), y)
    how = ("E4M3", (-1, -1), "POW2", 1.0, 0, "nearest", None, None)
    codes, scale = torch.ops.lowprec.quantize(y, *how)
    made, again = torch.ops.lowprec.quantize_by(x, y.abs().amax().float().view(1, 1), None, *how, rate, weight)
    assert torch.equal(made.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(scale, again)
    fold = (torch.tensor(3), 64, 0.125, (1, 16), "mse", 11, True)
    for transposed in (True, False):
        for op in (torch.ops.lowprec.rotate_fold_ladder, library.EAGER["rotate_fold_ladder"]):
            for given in (scale, None):
                got, want = op(x, given, transposed, *fold, None, rate, weight), op(y, given, transposed, *fold)
                for ours, theirs in zip(got, want, strict=True):
                    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_wrong_norm_inputs_are_refused():
    x, rate, weight = torch.randn(32, 16), torch.rand(32), torch.randn(16)
    fold = (True, None, 0, 1.0, (1, 16), "mse", 11, False, None)
    with pytest.raises(RuntimeError, match="BF16 or FP32"):
        torch.ops.lowprec.rotate_fold_ladder(x.half(), torch.ones(1, 1), *fold, rate, weight)
    with pytest.raises(RuntimeError, match="both"):
        torch.ops.lowprec.rotate_fold_ladder(x, torch.ones(1, 1), *fold, rate, None)
    with pytest.raises(RuntimeError, match="not 16 and 32"):
        torch.ops.lowprec.rotate_fold_ladder(x, torch.ones(1, 1), *fold, weight, rate)
    with pytest.raises(ValueError, match="not torch.float16"):
        reference.normalized(x.half(), rate, weight)
