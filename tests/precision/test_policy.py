"""Every linear has exactly one recipe, by the first pattern that its name matches (methods T18)."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lowprec_train.numerics.draws import Gemms, Operand, SeedTable
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.policy import Pattern, apply_policy, attach_draws, count_linears, named_linears
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.recipes import bf16, fp4, fp8, mxfp4
from tests import oracle


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = nn.ModuleDict({"qkv": Linear(64, 192, bias=False), "out": Linear(64, 64, bias=False)})
        self.mlp = nn.ModuleDict({"up": Linear(64, 128), "down": Linear(128, 64)})


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = Linear(64, 10, bias=False)


NAMES = [f"blocks.{i}.{n}" for i in range(3) for n in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]


def test_linears_in_the_order_of_the_model():
    model = Model()
    assert [name for name, _ in named_linears(model)] == [*NAMES, "head"]
    assert all(module is model.get_submodule(name) for name, module in named_linears(model))
    assert count_linears(model) == 13


def test_a_new_linear_is_the_identity():
    assert all(module.recipe == LinearRecipe() for _, module in named_linears(Model()))


def test_the_first_match_wins_and_the_table_is_what_the_layers_have():
    model = Model()
    policy = {
        "blocks.0.*": bf16.recipe(),
        "blocks.*.mlp.*": fp4.recipe(),
        "blocks.*": fp8.recipe(),
        "head": bf16.recipe(),
    }
    table = apply_policy(model, policy)
    assert list(table) == [*NAMES, "head"]
    for name, module in named_linears(model):
        if name == "head" or name.startswith("blocks.0."):
            want = bf16.recipe()
        else:
            want = fp4.recipe() if ".mlp." in name else fp8.recipe()
        assert module.recipe == want and table[name] == want


def test_a_policy_can_be_replaced():
    model = Model()
    apply_policy(model, {"blocks.*": fp4.recipe(), "head": bf16.recipe()})
    weights = [p.clone() for p in model.parameters()]
    table = apply_policy(model, {"*": bf16.recipe()})
    assert set(table.values()) == {bf16.recipe()}
    assert all(module.recipe.is_identity for _, module in named_linears(model))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))


def test_an_unmatched_linear_is_an_error():
    with pytest.raises(ValueError, match="head"):
        apply_policy(Model(), {"blocks.*": fp8.recipe()})


@pytest.mark.parametrize("unused", ["blocks.7.*", "block.*", "BLOCKS.*", "head.weight"])
def test_a_pattern_that_matches_nothing_is_an_error(unused):
    with pytest.raises(ValueError) as error:
        apply_policy(Model(), {unused: fp4.recipe(), "*": bf16.recipe()})
    assert unused in str(error.value)


def test_a_refused_policy_changes_no_layer():
    model = Model()
    apply_policy(model, {"*": fp8.recipe()})
    with pytest.raises(ValueError):
        apply_policy(model, {"blocks.*": fp4.recipe()})
    assert all(module.recipe == fp8.recipe() for _, module in named_linears(model))


def test_an_empty_policy_is_an_error():
    with pytest.raises(ValueError):
        apply_policy(Model(), {})


def test_draws_are_numbered_in_the_order_of_the_model():
    model = Model()
    attach_draws(model, SeedTable(77, count_linears(model)).at(3, 8))
    for site, (_, module) in enumerate(named_linears(model)):
        for gemm in Gemms:
            seed = module.draws.seed(gemm, Operand.A).item()
            assert seed == oracle.draw_seed(77, site, int(gemm), int(Operand.A), 3)


def test_a_stochastic_recipe_without_draws_says_so():
    layer = Linear(64, 64)
    layer.recipe = mxfp4.recipe()
    layer.draws = None
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(ValueError, match="attach_draws"):
        layer(x).sum().backward()


def test_a_shadowed_pattern_is_refused():
    model = torch.nn.ModuleDict({"head": Linear(8, 8)})
    with pytest.raises(ValueError, match=r"'head' matches only linears that earlier patterns match"):
        apply_policy(model, {"*": LinearRecipe(), "head": LinearRecipe()})


def test_a_layer_outside_of_a_run_draws_as_seed_0_step_0():
    x, dy = torch.randn(64, 64), torch.randn(64, 128)
    layer, attached = Linear(64, 128, bias=False), Linear(64, 128, bias=False)
    attached.load_state_dict(layer.state_dict())
    for each in (layer, attached):
        each.recipe = mxfp4.recipe()
    attached.draws = SeedTable(0, 1).at(0, 0).site(0)
    for each in (layer, attached, layer):
        each.weight.grad = None
        each(x).backward(dy)
    assert torch.equal(layer.weight.grad, attached.weight.grad)
    with torch.device("meta"):
        on_meta = Linear(64, 128)
    on_meta.recipe = mxfp4.recipe()
    assert on_meta.draws is None


@pytest.mark.parametrize(
    ("pattern", "layers", "blocks"),
    [
        ("blocks[85%:].*", 4, [3]),
        ("blocks[85%:].*", 32, [27, 28, 29, 30, 31]),
        ("blocks[:10%].*", 4, [0]),
        ("blocks[:1].*", 4, [0]),
        ("blocks[-2:].*", 4, [2, 3]),
        ("blocks[1:3].*", 4, [1, 2]),
        ("blocks[25%:75%].*", 4, [1, 2]),
        ("blocks[12.5%:].*", 8, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_slices_of_the_depth(pattern, layers, blocks):
    names = tuple(f"blocks.{i}.mlp.down" for i in range(layers)) + ("head",)
    assert [i for i in range(layers) if Pattern(pattern, names).matches(f"blocks.{i}.mlp.down")] == blocks
    assert not Pattern(pattern, names).matches("head")


def test_a_slice_goes_on_behind_the_number():
    names = tuple(f"blocks.{i}.{part}" for i in range(12) for part in ("mlp.down", "attention.out"))
    seen = [name for name in names if Pattern("blocks[-2:].mlp.*", names).matches(name)]
    assert seen == ["blocks.10.mlp.down", "blocks.11.mlp.down"]


@pytest.mark.parametrize("text", ["blocks[a:].*", "blocks[101%:].*", "blocks[1:2:3].*", "blocks[-5%:].*", "blocks[1:"])
def test_a_slice_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Pattern(text, ("blocks.0.mlp.down",))


def test_character_classes_stay_globs():
    names = tuple(f"blocks.{i}.mlp.down" for i in range(4))
    assert [name[7] for name in names if Pattern("blocks.[02].*", names).matches(name)] == ["0", "2"]
